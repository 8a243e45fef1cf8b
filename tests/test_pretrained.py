"""Other people's weights: folders and GGUF files written here, by `transformers` and `gguf` themselves, and read by both.

Nothing is downloaded. The real SmolLM2 is compared with published numbers where TINYLM_SMOLLM2 names its file.
"""
import json
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from test_model_references import exact

import tinylm
from tinylm.kv_cache import KVCache
from tinylm.pretrained import (attention_maps, compare_layers, first_difference, from_state_dict, half_split_rows, load_pretrained, name_table,
                               neighbour_rows, previous_word_score, recall_score)
from tinylm.sampling import generate
from tinylm.tokenizer import train_tokenizer
from tinylm.training import CheckpointError, save_checkpoint
from tinylm.transformer import ModelConfig, TransformerLM

V, T = 300, 24
LLAMA = dict(vocab_size=V, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=3,
             max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=False)
GPT2 = dict(vocab_size=V, n_positions=64, n_embd=24, n_layer=3, n_head=6, bos_token_id=0, eos_token_id=0)
MODELS = [
    ("gpt2", GPT2), ("gpt2", {**GPT2, "n_inner": 40, "layer_norm_epsilon": 1e-3}), ("gpt2", {**GPT2, "tie_word_embeddings": False}),
    ("llama", LLAMA), ("llama", {**LLAMA, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("llama", {**LLAMA, "num_key_value_heads": 6, "attention_bias": True, "rms_norm_eps": 1e-3}),
    ("llama", {**LLAMA, "mlp_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    ("mistral", LLAMA), ("qwen2", LLAMA), ("qwen2", {**LLAMA, "tie_word_embeddings": True}),
]
IDS = torch.randint(V, (2, T), generator=torch.Generator().manual_seed(0))


def name_of(case):
    kind, fields = case
    return "-".join([kind, *(f"{k}={v}" for k, v in fields.items() if (GPT2 if kind == "gpt2" else LLAMA).get(k) != v)])


def published(kind, fields, seed=0):
    "A model of `transformers` whose every weight is random and matters."
    config = transformers.AutoConfig.for_model(kind, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        gain = name.endswith("weight") and ("norm" in name or "ln_" in name)
        weight.data.copy_(0.3 * torch.randn(weight.shape, generator=generator) + gain)
    return model


def tokenizer_of():
    return train_tokenizer(["red kite blue boat 12, a red kite 12; blue boat 12? blue kite 12! " * 9], 275)


def folder_of(model, path):
    model.save_pretrained(path)
    tokenizer_of().save(path / "tokenizer.json")
    return path


def logits(model, ids=IDS):
    with torch.no_grad():
        result = model(ids)
    return getattr(result, "logits", result)


# --- a folder -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", MODELS, ids=name_of)
def test_logits_equal_the_library_that_published_the_model(case, tmp_path):
    reference = published(*case)
    model, _ = load_pretrained(folder_of(reference, tmp_path / "model"), dtype=torch.float64)
    reference = reference.double() if case[0] == "gpt2" else exact(reference)
    theirs = logits(reference)
    assert theirs.std() > 0.3 and model.embedding.weight.dtype == torch.float64
    torch.testing.assert_close(logits(model), theirs, atol=1e-10, rtol=0)
    numbers = sum(weight.count_nonzero().item() for weight in model.parameters())  # zero are only the biases that they do not have
    assert numbers == reference.num_parameters()


@pytest.mark.parametrize("case", [MODELS[0], MODELS[3], MODELS[8]], ids=name_of)
def test_greedy_text_equals_the_reference_cached_and_uncached(case):
    reference = published(*case)
    model = from_state_dict(reference.state_dict(), reference.config)
    theirs = reference.generate(IDS[:1, :6], max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=None)
    for use_cache in (True, False):
        assert generate(model, IDS[:1, :6], 20, use_cache=use_cache).equal(theirs)


@pytest.mark.parametrize("case", MODELS, ids=name_of)
def test_every_tensor_is_used_and_none_may_be_missing(case):
    reference = published(*case)
    state = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    tied = reference.config.tie_word_embeddings
    before = logits(from_state_dict(state, reference.config))
    for name, tensor in state.items():
        if tied and name in ("lm_head.weight", "model.embed_tokens.weight", "transformer.wte.weight"):
            continue
        without = {other: weight for other, weight in state.items() if other != name}
        with pytest.raises(ValueError, match=f"{name} is missing"):
            from_state_dict(without, reference.config)
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
        shifted = state | {name: tensor + 0.2 * noise}
        if name.endswith(("k_proj.bias",)):  # the same for every key: softmax does not see it, if it is not rotated
            shifted = state | {name: tensor + 2 * noise}
        assert (logits(from_state_dict(shifted, reference.config)) - before).abs().max() > 1e-5, name


@pytest.mark.parametrize("case", [MODELS[0], MODELS[3]], ids=name_of)
def test_a_tensor_without_a_place_is_refused_by_name(case):
    reference = published(*case)
    with pytest.raises(ValueError, match="2 tensors have no place in this model, for instance .*extra.weight"):
        from_state_dict({**reference.state_dict(), "extra.weight": torch.ones(3), "more": torch.ones(3)}, reference.config)


def test_a_tensor_of_another_shape_is_refused_with_both_shapes():
    reference = published("llama", LLAMA)
    state = {**reference.state_dict(), "model.layers.1.mlp.down_proj.weight": torch.ones(40, 24)}
    with pytest.raises(ValueError, match=r"blocks.1.ffn.down_proj.weight has shape \(40, 24\), the model \(24, 40\)"):
        from_state_dict(state, reference.config)


def test_old_gpt2_files_have_short_names_and_carry_their_masks():
    reference = published("gpt2", GPT2)
    state = {name.removeprefix("transformer."): tensor for name, tensor in reference.state_dict().items() if name != "lm_head.weight"}
    for i in range(3):
        state |= {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64).tril(), f"h.{i}.attn.masked_bias": torch.tensor(-1e4)}
    assert logits(from_state_dict(state, reference.config)).equal(logits(from_state_dict(reference.state_dict(), reference.config)))


def test_a_missing_bias_of_gpt2_is_no_mask():
    reference = published("gpt2", GPT2)
    state = {name: tensor for name, tensor in reference.state_dict().items() if name != "transformer.h.1.attn.c_attn.bias"}
    with pytest.raises(ValueError, match="transformer.h.1.attn.c_attn.bias is missing"):
        from_state_dict(state, reference.config)


def test_tied_is_one_object_and_a_stored_copy_must_be_one():
    reference = published("llama", {**LLAMA, "tie_word_embeddings": True})
    state = dict(reference.state_dict())
    model = from_state_dict(state, reference.config)
    assert model.head.weight is model.embedding.weight
    del state["lm_head.weight"]
    assert logits(from_state_dict(state, reference.config)).equal(logits(model))
    with pytest.raises(ValueError, match="lm_head.weight is not the embedding table"):
        from_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"] + 1}, reference.config)


def test_weights_cut_into_several_files(tmp_path):
    reference = published("llama", LLAMA)
    whole = folder_of(reference, tmp_path / "whole")
    cut = tmp_path / "cut"
    reference.save_pretrained(cut, max_shard_size="12KB")
    tokenizer_of().save(cut / "tokenizer.json")
    assert len(list(cut.glob("*.safetensors"))) > 2
    a, b = load_pretrained(whole)[0], load_pretrained(cut)[0]
    assert all(x.equal(y) for x, y in zip(a.parameters(), b.parameters()))
    next(cut.glob("*00002-of*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match="00002-of"):
        load_pretrained(cut)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_weights_stored_in_two_bytes_come_in_the_dtype_that_is_asked(stored, tmp_path):
    reference = published("llama", LLAMA)
    path = folder_of(published("llama", LLAMA).to(stored), tmp_path / "model")
    for weight in reference.parameters():  # not .to(stored).float(): the library would round its table of angles as well
        weight.data = weight.data.to(stored).float()
    model, _ = load_pretrained(path)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32} and not model.training
    assert model.blocks[0].norm1.weight.equal(reference.model.layers[0].input_layernorm.weight)
    torch.testing.assert_close(logits(model), logits(reference), atol=1e-4, rtol=1e-4)
    assert load_pretrained(path, dtype=torch.bfloat16)[0].embedding.weight.dtype == torch.bfloat16


def test_the_tokenizer_comes_with_it_in_both_spellings(tmp_path):
    path = folder_of(published("gpt2", GPT2), tmp_path / "model")
    text = "blue kite, red boat 🪁"
    expected = tokenizer_of().encode(text)
    assert load_pretrained(path)[1].encode(text) == expected
    bpe = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (path / "vocab.json").write_text(json.dumps(bpe["vocab"]), encoding="utf-8")
    (path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in bpe["merges"]), encoding="utf-8")
    (path / "tokenizer.json").unlink()
    assert load_pretrained(path)[1].encode(text) == expected
    (path / "vocab.json").unlink()
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        load_pretrained(path)


def test_what_is_no_published_model_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere: there is no such folder or file"):
        load_pretrained(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="config.json cannot be read"):
        load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="config.json cannot be read"):
        load_pretrained(tmp_path)
    save_checkpoint(tmp_path / "own", TransformerLM(ModelConfig.preset("tiny", n_layers=1)))
    with pytest.raises(CheckpointError, match="load_checkpoint"):
        load_pretrained(tmp_path / "own")
    file = tmp_path / "weights.bin"
    file.write_bytes(b"not a model")
    with pytest.raises(CheckpointError, match="weights.bin is not a whole GGUF file"):
        load_pretrained(file)


def test_a_broken_safetensors_file_is_named(tmp_path):
    path = folder_of(published("llama", LLAMA), tmp_path / "model")
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="model.safetensors cannot be read"):
        load_pretrained(path)


# --- configurations -------------------------------------------------------------------------------------------------------------------

PLAIN = dict(model_type="llama", vocab_size=50, hidden_size=24, intermediate_size=40, num_hidden_layers=1, num_attention_heads=6,
             num_key_value_heads=3, max_position_embeddings=64, rms_norm_eps=1e-6)
PLAIN_GPT2 = dict(model_type="gpt2", vocab_size=50, n_positions=64, n_embd=24, n_layer=1, n_head=6, layer_norm_epsilon=1e-5)
STRANGE = [
    (PLAIN, dict(model_type="qwen3")), (PLAIN, dict(model_type="gemma")), (PLAIN, dict(hidden_act="gelu")), (PLAIN, dict(head_dim=8)),
    (PLAIN, dict(partial_rotary_factor=0.5)), (PLAIN, dict(rope_scaling={"type": "linear", "factor": 2.0})),
    (PLAIN, dict(rope_scaling={"rope_type": "yarn", "factor": 2.0})), (PLAIN, dict(rope_parameters={"rope_type": "llama3", "factor": 8.0})),
    (PLAIN, dict(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.25})),
    (PLAIN_GPT2, dict(activation_function="gelu")), (PLAIN_GPT2, dict(activation_function="relu")), (PLAIN_GPT2, dict(scale_attn_weights=False)),
    (PLAIN_GPT2, dict(scale_attn_by_inverse_layer_idx=True)), (PLAIN_GPT2, dict(add_cross_attention=True)),
]


@pytest.mark.parametrize("plain, strange", STRANGE, ids=lambda value: next(iter(value.items()))[0] if len(value) == 1 else None)
def test_a_setting_that_is_not_built_here_is_refused_by_name(plain, strange):
    (name, _), = strange.items()
    with pytest.raises(ValueError, match="rope" if name.startswith("rope") else name):
        from_state_dict({}, plain | strange)


@pytest.mark.parametrize("plain", [PLAIN, PLAIN_GPT2], ids=["llama", "gpt2"])
def test_a_size_that_is_not_said_is_not_guessed(plain):
    for name in plain.keys() - {"num_key_value_heads"}:
        with pytest.raises(ValueError, match=f"the configuration does not say {name}"):
            from_state_dict({}, {key: value for key, value in plain.items() if key != name})


def config_read(**fields):
    "The configuration of a random model of these settings."
    reference = published("llama", {**LLAMA, "num_hidden_layers": 1})
    settings = {**reference.config.to_dict(), **fields}
    return from_state_dict(reference.state_dict(), settings).config


def test_old_and_new_spelling_of_the_rotary_base():
    assert config_read(rope_parameters=None, rope_theta=700.0).rope_theta == 700.0
    assert config_read(rope_parameters={"rope_type": "default", "rope_theta": 800.0}).rope_theta == 800.0
    assert config_read(rope_parameters=None, rope_scaling=None).rope_theta == 10000.0


def test_a_window_that_slides_limits_the_text_to_where_it_makes_no_difference():
    assert config_read(sliding_window=16).context_length == 16
    assert config_read(sliding_window=None).context_length == 64
    assert config_read(sliding_window=4096).context_length == 64
    assert config_read(sliding_window=16, use_sliding_window=False).context_length == 64


def test_a_mistral_with_a_window_agrees_up_to_the_window_and_refuses_more():
    reference = published("mistral", {**LLAMA, "sliding_window": 16})
    model = from_state_dict(reference.state_dict(), reference.config)
    torch.testing.assert_close(logits(model, IDS[:, :16]), logits(reference, IDS[:, :16]), atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="context_length=16"):
        model(IDS[:, :17])


# --- the order of the pairs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads, D", [(1, 2), (1, 4), (1, 8), (3, 8), (2, 16)])
def test_rows_are_carried_as_llama_cpp_does(heads, D):
    weight = np.random.default_rng(0).normal(size=(heads * D, 5))
    theirs = weight.reshape(heads, 2, D // 2, 5).swapaxes(1, 2).reshape(weight.shape)  # its converter, from half-split to neighbours
    assert np.array_equal(neighbour_rows(torch.tensor(weight), heads).numpy(), theirs)
    assert np.array_equal(half_split_rows(torch.tensor(theirs), heads).numpy(), weight)
    bias = torch.arange(heads * D)
    assert half_split_rows(neighbour_rows(bias, heads), heads).equal(bias)


def test_pairs_by_hand():
    assert half_split_rows(torch.arange(8), 1).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert neighbour_rows(torch.arange(8), 1).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert half_split_rows(torch.arange(8), 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


# --- GGUF -----------------------------------------------------------------------------------------------------------------------------

GGUF_OF = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
           "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
           "post_attention_layernorm": "ffn_norm", "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
WIDE = {**LLAMA, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


def gguf_file(path, model, *, kind=None, architecture="llama", pre="gpt-2", settings=(), extra=()):
    "A Llama of `transformers` as a GGUF file, large matrices in `kind`; rows of queries and keys permuted as llama.cpp's converter does."
    c, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    for name, value in settings:
        writer.add_string(name, value)
    bpe = json.loads(tokenizer_of().backend.to_str())["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].get)
    tokens += [f"<{i}>" for i in range(V - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if len(token) > 1 and token[0] == "<" else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    for name, tensor in [*model.state_dict().items(), *extra]:
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        array = tensor.numpy()
        heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}.get(name.split(".")[-2])
        if heads:
            array = array.reshape(heads, 2, -1, c.hidden_size).swapaxes(1, 2).reshape(array.shape)
        place = name.removesuffix(".weight")
        if place.startswith("model.layers."):
            _, _, i, module = place.split(".", 3)
            name = f"blk.{i}.{GGUF_OF[module]}.weight"
        else:
            name = GGUF_OF.get(place, place) + ".weight"
        if kind is not None and array.ndim == 2:
            writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(array))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_gguf_file_gives_the_same_weights_as_the_folder(tied, tmp_path):
    reference = published("llama", {**WIDE, "tie_word_embeddings": tied})
    model, tokenizer = load_pretrained(gguf_file(tmp_path / "m.gguf", reference))
    same = from_state_dict(reference.state_dict(), reference.config)
    assert all(a.equal(b) for a, b in zip(model.parameters(), same.parameters(), strict=True))
    assert model.config.rope_theta == 10000.0 and abs(model.config.norm_eps - 1e-5) < 1e-11 and model.config.tie_embeddings == tied
    assert tokenizer.encode("blue kite!") == tokenizer_of().encode("blue kite!") and tokenizer.eot_id == 0


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_1", "F16"])
def test_packed_weights_are_unpacked_as_transformers_unpacks_them(kind, tmp_path):
    reference = published("llama", WIDE)
    kind = gguf.GGMLQuantizationType[kind]
    gguf_file(tmp_path / "m.gguf", reference, kind=kind)
    model, _ = load_pretrained(tmp_path / "m.gguf")
    packed = {name: gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind) if tensor.ndim == 2 else tensor.numpy()
              for name, tensor in reference.state_dict().items()}  # rows are packed one by one: their order does not matter
    reference.load_state_dict({name: torch.tensor(array) for name, array in packed.items()})
    torch.testing.assert_close(logits(model), logits(reference), atol=2e-4, rtol=1e-4)


def test_transformers_reads_the_same_model_from_a_gguf_file(tmp_path):
    gguf_file(tmp_path / "m.gguf", published("llama", WIDE))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf").eval()
    torch.testing.assert_close(logits(load_pretrained(tmp_path / "m.gguf")[0]), logits(theirs), atol=2e-4, rtol=1e-4)


def test_digits_stand_alone_only_where_the_file_says_so(tmp_path):
    reference = published("llama", WIDE)
    plain = load_pretrained(gguf_file(tmp_path / "a.gguf", reference))[1]
    smollm = load_pretrained(gguf_file(tmp_path / "b.gguf", reference, pre="smollm"))[1]
    assert len(plain.encode(" 12")) == 1
    assert smollm.encode("kite 12") == plain.encode("kite") + plain.encode(" ") + plain.encode("1") + plain.encode("2")
    assert smollm.decode(smollm.encode("a  2 日本 1000")) == "a  2 日本 1000"
    assert smollm.encode("<|endoftext|>") != [0] and smollm.encode("<|endoftext|>", "all") == [0]


@pytest.mark.parametrize("options, message", [
    (dict(architecture="qwen2"), "general.architecture='qwen2'"),
    (dict(pre="llama-bpe"), "pre='llama-bpe'"),
    (dict(settings=[("llama.rope.scaling.type", "yarn")]), "yarn"),
    (dict(extra=[("rope_freqs.weight", torch.ones(8))]), "rope_freqs.weight"),
], ids=["architecture", "cut", "stretched", "frequencies"])
def test_a_gguf_file_of_another_kind_is_refused_by_name(options, message, tmp_path):
    file = gguf_file(tmp_path / "m.gguf", published("llama", WIDE), **options)
    with pytest.raises(ValueError, match=message):
        load_pretrained(file)


def test_scaling_of_type_none_is_none(tmp_path):
    load_pretrained(gguf_file(tmp_path / "m.gguf", published("llama", WIDE), settings=[("llama.rope.scaling.type", "none")]))


def test_half_a_gguf_file_is_refused(tmp_path):
    file = gguf_file(tmp_path / "m.gguf", published("llama", WIDE))
    data = file.read_bytes()
    for end in (3, len(data) // 2, len(data) - 100):
        file.write_bytes(data[:end])
        with pytest.raises(CheckpointError, match="m.gguf is not a whole GGUF file"):
            load_pretrained(file)


# --- the first tensor that differs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [MODELS[0], MODELS[3]], ids=name_of)
def test_the_first_difference_names_the_module_at_fault(case):
    reference = published(*case)
    state, config = reference.state_dict(), reference.config
    model = from_state_dict(state, config)
    assert first_difference(compare_layers(model, reference, IDS)) is None
    for place in name_table("gpt2" if case[0] == "gpt2" else "llama", 3):
        if "position" in place or place == "head" and config.tie_word_embeddings:
            continue
        model = from_state_dict(state, config)
        weight = model.get_parameter(f"{place}.weight")
        weight.data.mul_(1.01)
        assert first_difference(compare_layers(model, reference, IDS)) == f"out of {place}"


def test_a_fault_between_two_modules_is_seen_where_it_goes_in():
    reference = published("llama", LLAMA)
    model = from_state_dict(reference.state_dict(), {**reference.config.to_dict(), "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}})
    assert first_difference(compare_layers(model, reference, IDS)) == "into blocks.0.attention.out_proj"


def test_not_a_number_is_a_difference():
    assert first_difference({"a": 0.0, "b": float("nan"), "c": 1.0}) == "b"
    assert first_difference({"a": 1e-6, "b": 1e-5}) is None and first_difference({"a": 1e-6, "b": 1e-5}, 1e-6) == "b"


def test_comparing_leaves_no_trace():
    reference = published("llama", LLAMA)
    model = from_state_dict(reference.state_dict(), reference.config).train()
    compare_layers(model, reference, IDS)
    attention_maps(model, IDS)
    assert model.training
    for module in [*model.modules(), *reference.modules()]:
        assert not module._forward_hooks and not module._forward_pre_hooks


# --- what the heads look at -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [MODELS[0], MODELS[3], MODELS[4]], ids=name_of)
def test_attention_maps_equal_the_reference(case):
    reference = published(*case)
    reference.set_attn_implementation("eager")
    maps = attention_maps(from_state_dict(reference.state_dict(), reference.config), IDS)
    with torch.no_grad():
        theirs = reference(IDS, output_attentions=True).attentions
    assert len(maps) == len(theirs) == 3
    for ours, other in zip(maps, theirs):
        torch.testing.assert_close(ours, other, atol=1e-5, rtol=0)


def test_scores_by_hand():
    weights = torch.zeros(1, 2, 6, 6)  # three tokens said twice
    weights[0, 0, range(1, 6), range(5)] = 1.0  # head 0 looks one back
    weights[0, 1, 3, 1] = weights[0, 1, 4, 2] = 1.0  # head 1: the second a looks at what followed the first; so does b
    weights[0, 1, 5, 0] = 1.0  # c does not
    assert previous_word_score(weights).tolist() == [1.0, 0.0]
    torch.testing.assert_close(recall_score(weights, 3), torch.tensor([0.0, 2 / 3]))


# --- a real model -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2():
    path = os.environ.get("TINYLM_SMOLLM2")
    if not path:
        pytest.skip("TINYLM_SMOLLM2 does not name SmolLM2-135M-Instruct.Q4_1.gguf (chapter 10 says where it is)")
    return load_pretrained(path)


@pytest.fixture(scope="module")
def answers(local_data):
    return json.loads((local_data / "reference" / "smollm2.json").read_text(encoding="utf-8"))


def test_smollm2_reads_and_continues_as_published(smollm2, answers):
    model, tokenizer = smollm2
    assert model.num_parameters() == 134_515_008 and tokenizer.vocab_size == 49_152
    for case in answers["cases"]:
        ids = torch.tensor([tokenizer.encode(case["prompt"])])
        assert ids[0].tolist() == case["token_ids"]
        values, top = logits(model, ids)[0, -1].topk(10)
        assert top.tolist() == case["top10_ids"]
        torch.testing.assert_close(values, torch.tensor(case["top10_logits"]), atol=1e-4, rtol=0)
        for use_cache in (True, False):
            assert generate(model, ids, 20, use_cache=use_cache)[0, ids.shape[1] :].tolist() == case["greedy20_ids"]


def test_smollm2_cuts_text_as_published(smollm2, answers):
    for case in answers["tokenizer_cases"]:
        assert smollm2[1].encode(case["text"]) == case["ids_digits_pretok"]


def test_smollm2_loss_on_a_passage_as_published_also_through_the_cache(smollm2, answers):
    model, ids = smollm2[0], torch.tensor([answers["eval"]["token_ids"]])
    cache = KVCache.for_model(model, 1, 512)
    with torch.no_grad():
        pieces = torch.cat([model(piece, cache=cache) for piece in ids.split((300, 1, 211), dim=1)], dim=1)
    for found in (logits(model, ids), pieces):
        loss = torch.nn.functional.cross_entropy(found[0, :-1], ids[0, 1:]).item()
        assert abs(loss - answers["eval"]["mean_nll"]) < 1e-4


def test_the_log_of_chapter_10_is_of_that_file(answers):
    log = Path(__file__).parents[1] / "data" / "runs" / "smollm2" / "portrait.json"
    seen = json.loads(log.read_text(encoding="utf-8"))
    assert seen["sha256"] == answers["gguf_sha256"]
    first = answers["cases"][0]
    assert seen["top"] == first["top10_tokens"] and seen["goes_on"] == first["greedy20_text"]
    assert np.allclose(seen["top_logits"], first["top10_logits"], atol=1e-2)


def test_the_package_offers_it():
    assert tinylm.load_pretrained is load_pretrained
