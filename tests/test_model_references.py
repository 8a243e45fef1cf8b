"""The whole model against models that were not written here: `transformers`' Llama and GPT-2 with the same random weights, and plain numpy.

No file is downloaded: both libraries build their models from a configuration, and our weights are copied in.
"""
import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tinylm.kv_cache import KVCache
from tinylm.transformer import ModelConfig, TransformerLM, kite_model


def build(seed=0, **fields):
    "A float64 model whose every parameter is random and large enough to matter: gains and biases too."
    config = ModelConfig(**{**dict(vocab_size=23, context_length=16, d_model=24, n_layers=3, n_heads=4, d_ff=20), **fields})
    generator = torch.Generator().manual_seed(seed)
    model = TransformerLM(config).double().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.copy_(1 + 0.3 * noise if "norm" in name and name.endswith("weight") else 0.4 * noise)
    return model


def random_ids(model, batch=3, length=11, seed=0):
    return torch.randint(model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


# --- transformers ---------------------------------------------------------------------------------------------------------------------


def llama_tensors(tensors, config):
    "Tensors under our names -> the same tensors under the names and shapes of LlamaForCausalLM."
    D, kinds = config.head_dim, ("weight", "bias")
    table = tensors["embedding.weight"]
    theirs = {"model.embed_tokens.weight": table, "model.norm.weight": tensors["norm.weight"], "lm_head.weight": tensors.get("head.weight", table)}
    for i, kind in itertools.product(range(config.n_layers), kinds):
        ours, layer = f"blocks.{i}.", f"model.layers.{i}."
        if kind == "weight":
            theirs[layer + "input_layernorm.weight"] = tensors[ours + "norm1.weight"]
            theirs[layer + "post_attention_layernorm.weight"] = tensors[ours + "norm2.weight"]
        if ours + f"attention.qkv_proj.{kind}" not in tensors:
            continue
        rows = (config.n_heads * D, config.kv_heads * D, config.kv_heads * D)
        for name, part in zip("qkv", tensors[ours + f"attention.qkv_proj.{kind}"].split(rows)):
            theirs[layer + f"self_attn.{name}_proj.{kind}"] = part
        for name, part in zip(("gate", "up"), tensors[ours + f"ffn.gate_up_proj.{kind}"].split(config.ffn_width)):
            theirs[layer + f"mlp.{name}_proj.{kind}"] = part
        if ours + f"attention.out_proj.{kind}" in tensors:
            theirs[layer + f"self_attn.o_proj.{kind}"] = tensors[ours + f"attention.out_proj.{kind}"]
            theirs[layer + f"mlp.down_proj.{kind}"] = tensors[ours + f"ffn.down_proj.{kind}"]
    return theirs


def gpt2_tensors(tensors, config):
    "Tensors under our names -> those of GPT2LMHeadModel, whose linear maps are stored (in, out)."
    table = tensors["embedding.weight"]
    theirs = {"transformer.wte.weight": table, "transformer.wpe.weight": tensors["position_embedding.weight"],
              "lm_head.weight": tensors.get("head.weight", table)}
    pairs = {"norm": "ln_f"}
    for i in range(config.n_layers):
        inside = {"norm1": "ln_1", "attention.qkv_proj": "attn.c_attn", "attention.out_proj": "attn.c_proj",
                  "norm2": "ln_2", "ffn.up_proj": "mlp.c_fc", "ffn.down_proj": "mlp.c_proj"}
        pairs |= {f"blocks.{i}.{ours}": f"h.{i}.{other}" for ours, other in inside.items()}
    for (ours, other), kind in itertools.product(pairs.items(), ("weight", "bias")):
        tensor = tensors[f"{ours}.{kind}"]
        theirs[f"transformer.{other}.{kind}"] = tensor.T if tensor.ndim == 2 else tensor
    return theirs


class ExactRotary(nn.Module):
    "Llama's rotary table in float64; the library's own stays in float32 even in a float64 model."

    def __init__(self, head_dim, theta):
        super().__init__()
        self.frequencies = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]

    def forward(self, x, position_ids):
        angles = position_ids[..., None].double() * torch.tensor(self.frequencies * 2, dtype=torch.float64)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def exact(llama):
    "The same Llama, kept in float64 throughout: norms and rotary table are the two places where the library goes to float32."
    for parent in llama.modules():
        for name, module in list(parent.named_children()):
            if type(module).__name__.endswith("RMSNorm"):  # Llama's, Mistral's, Qwen 2's
                setattr(parent, name, nn.RMSNorm(len(module.weight), module.variance_epsilon))
                getattr(parent, name).weight = module.weight
    config = llama.config
    llama.model.rotary_emb = ExactRotary(config.hidden_size // config.num_attention_heads, config.rope_parameters["rope_theta"])
    return llama.double()


def llama(model, dtype=torch.float64):
    "LlamaForCausalLM with this model's weights: patched to be exact in float64, untouched in float32."
    c = model.config
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.d_model, intermediate_size=c.ffn_width, num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads, num_key_value_heads=c.kv_heads, max_position_embeddings=c.context_length, rms_norm_eps=c.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta}, tie_word_embeddings=c.tie_embeddings,
        attention_bias=c.bias, mlp_bias=c.bias,
        attn_implementation="sdpa" if dtype == torch.float64 else "eager",  # "eager" takes its softmax in float32
    )
    reference = LlamaForCausalLM(config)
    reference = exact(reference) if dtype == torch.float64 else reference
    reference.load_state_dict(llama_tensors(dict(model.named_parameters()), c))
    return reference.eval()


def gpt2(model, dtype=torch.float64):
    "GPT2LMHeadModel with this model's weights."
    c = model.config
    config = GPT2Config(vocab_size=c.vocab_size, n_positions=c.context_length, n_embd=c.d_model, n_layer=c.n_layers, n_head=c.n_heads,
                        n_inner=c.ffn_width, layer_norm_epsilon=c.norm_eps, tie_word_embeddings=c.tie_embeddings,
                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, attn_implementation="eager")
    reference = GPT2LMHeadModel(config).to(dtype)
    reference.load_state_dict(gpt2_tensors(dict(model.named_parameters()), c))
    return reference.eval()


LLAMA_LIKE = [  # the defaults of ModelConfig are Llama's kind: rope, rmsnorm, swiglu
    dict(seed=0),
    dict(seed=1, n_kv_heads=2),
    dict(seed=2, n_kv_heads=1, tie_embeddings=False),
    dict(seed=3, n_kv_heads=2, tie_embeddings=False, rope_theta=500.0, norm_eps=1e-2),
    dict(seed=4, n_heads=6, n_kv_heads=3, rope_theta=1e6, norm_eps=1e-6),
    dict(seed=5, n_heads=1, n_layers=1, backend="fused"),
    dict(seed=6, n_kv_heads=2, bias=True, backend="fused"),
    dict(seed=7, d_ff=None, n_heads=12, n_kv_heads=4, context_length=64),
]
GPT2_LIKE = [
    {**dict(position="learned", norm="layernorm", ffn="gelu", bias=True), **fields}
    for fields in (
        dict(seed=0),
        dict(seed=1, tie_embeddings=False),
        dict(seed=2, n_heads=6, norm_eps=1e-2),
        dict(seed=3, n_heads=1, d_ff=None),
        dict(seed=4, n_heads=8, n_layers=1, backend="fused"),
    )
]


def case_id(fields):
    return "-".join(f"{name}={value}" for name, value in fields.items())


@pytest.mark.parametrize("fields", LLAMA_LIKE, ids=case_id)
def test_logits_equal_llama_in_float64(fields):
    model = build(**fields)
    ids = random_ids(model)
    with torch.no_grad():
        ours, theirs = model(ids), llama(model)(ids).logits
    assert ours.std() > 0.5, "the comparison must not be between two rows of zeros"
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)


@pytest.mark.parametrize("fields", LLAMA_LIKE, ids=case_id)
def test_logits_equal_an_untouched_llama_in_float32(fields):
    model = build(**fields).float()
    ids = random_ids(model)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), llama(model, torch.float32)(ids).logits, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("fields", GPT2_LIKE, ids=case_id)
@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-10), (torch.float32, 1e-4)], ids=["float64", "float32"])
def test_logits_equal_gpt2(fields, dtype, atol):
    model = build(**fields).to(dtype)
    ids = random_ids(model)
    with torch.no_grad():
        ours, theirs = model(ids), gpt2(model, dtype)(ids).logits
    assert ours.std() > 0.5
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


@pytest.mark.parametrize(
    "family, rename, fields",
    [(llama, llama_tensors, LLAMA_LIKE[3]), (llama, llama_tensors, LLAMA_LIKE[6]), (gpt2, gpt2_tensors, GPT2_LIKE[0]), (gpt2, gpt2_tensors, GPT2_LIKE[1])],
    ids=["llama-grouped", "llama-bias-tied", "gpt2-tied", "gpt2-untied"],
)
def test_every_gradient_equals_the_reference(family, rename, fields):
    model = build(**fields)
    reference, ids = family(model), random_ids(model)
    targets = random_ids(model, seed=1).flatten()
    F.cross_entropy(model(ids).flatten(0, 1), targets).backward()
    F.cross_entropy(reference(ids).logits.flatten(0, 1), targets).backward()
    gradients = rename({name: weight.grad for name, weight in model.named_parameters()}, model.config)
    for name, weight in reference.named_parameters():
        torch.testing.assert_close(gradients[name], weight.grad, atol=1e-10, rtol=0, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("family, fields", [(llama, LLAMA_LIKE[1]), (gpt2, GPT2_LIKE[0])], ids=["llama", "gpt2"])
def test_left_padded_rows_equal_the_reference(family, fields):
    model = build(**fields)
    ids = random_ids(model)
    pad_mask = torch.arange(ids.shape[1]) >= torch.tensor([[0], [4], [9]])  # rows with 0, 4 and 9 pads in front
    position_ids = (pad_mask.long().cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        ours = model(ids, pad_mask=pad_mask)
        theirs = family(model)(ids, attention_mask=pad_mask.long(), position_ids=position_ids).logits
    assert ours.isfinite().all(), "a pad's own logits mean nothing, but they are numbers"
    torch.testing.assert_close(ours[pad_mask], theirs[pad_mask], atol=1e-10, rtol=0)


@pytest.mark.parametrize("family, fields", [(llama, LLAMA_LIKE[1]), (gpt2, GPT2_LIKE[0])], ids=["llama", "gpt2"])
def test_word_by_word_through_our_cache_equals_the_reference_at_once(family, fields):
    model = build(**fields)
    ids, cache = random_ids(model), KVCache.for_model(model, 3, 16)
    with torch.no_grad():
        ours = torch.cat([model(ids[:, t : t + 1], cache=cache) for t in range(ids.shape[1])], dim=1)
        torch.testing.assert_close(ours, family(model)(ids).logits, atol=1e-10, rtol=0)


# --- the kite model -------------------------------------------------------------------------------------------------------------------

SENTENCE = torch.tensor([[0, 1, 3, 2, 4, 1]])  # . red kite blue boat red


def test_kite_model_answers_in_elevenths():
    logits = kite_model()(SENTENCE)[0, -1]
    torch.testing.assert_close(logits * 11, torch.tensor([-18.0, -18, -18, 42, -6], dtype=torch.float64), atol=1e-9, rtol=0)


def test_kite_model_equals_llama():
    model = kite_model()
    with torch.no_grad():
        torch.testing.assert_close(model(SENTENCE), llama(model)(SENTENCE).logits, atol=1e-12, rtol=0)


def test_kite_model_is_sixty_small_integers():
    weights = torch.cat([w.flatten() for name, w in kite_model().named_parameters() if "norm" not in name])
    gains = torch.cat([w.flatten() for name, w in kite_model().named_parameters() if "norm" in name])
    assert (len(weights), len(gains)) == (784, 40)
    assert weights.count_nonzero() == 60 and weights.abs().max() == 12 and torch.equal(weights, weights.round())
    assert torch.equal(gains, torch.ones_like(gains))


def kite_stories():
    "All 16: which colour comes first, what the red and the blue one are, which colour is asked; then the answer."
    for first, red, blue, asked in itertools.product((1, 2), (3, 4), (3, 4), (1, 2)):
        thing, second = {1: red, 2: blue}, 3 - first
        yield [0, first, thing[first], second, thing[second], asked], thing[asked]


def test_kite_model_answers_all_sixteen_stories():
    stories, answers = zip(*kite_stories())
    probabilities = kite_model()(torch.tensor(stories))[:, -1].softmax(dim=-1)
    assert len(stories) == 16 and probabilities.argmax(dim=-1).tolist() == list(answers)
    assert probabilities.max(dim=-1).values.min() > 0.95


# --- numpy: every combination the two families do not have ------------------------------------------------------------------------------


def numpy_logits(model, ids):
    "The forward pass of one row in float64 numpy, head by head and query by query; nothing of tinylm but its weights."
    c, w = model.config, {name: weight.detach().numpy() for name, weight in model.state_dict().items()}
    C, H, K, D, T, F_ = c.d_model, c.n_heads, c.kv_heads, c.head_dim, len(ids), c.ffn_width

    def linear(x, name):
        return x @ w[name + ".weight"].T + w.get(name + ".bias", 0.0)

    def norm(x, name):
        if c.norm == "layernorm":
            x = x - x.mean(axis=-1, keepdims=True)
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + c.norm_eps) * w[name + ".weight"] + w.get(name + ".bias", 0.0)

    def rotate(vector, position):
        if c.position != "rope":
            return vector
        turned = (vector[: D // 2] + 1j * vector[D // 2 :]) * np.exp(1j * position * c.rope_theta ** (-2 * np.arange(D // 2) / D))
        return np.concatenate((turned.real, turned.imag))

    x = w["embedding.weight"][ids]
    if c.position == "learned":
        x = x + w["position_embedding.weight"][:T]
    if c.position == "sinusoidal":
        angle = [[t / 10000 ** (2 * (j // 2) / C) for j in range(C)] for t in range(T)]
        x = x + np.where(np.arange(C) % 2 == 0, np.sin(angle), np.cos(angle)).astype(np.float32)  # the documented dtype of that table
    for i in range(c.n_layers):
        qkv = linear(norm(x, f"blocks.{i}.norm1"), f"blocks.{i}.attention.qkv_proj")
        heads = np.zeros((T, C))
        for h, t in itertools.product(range(H), range(T)):
            own, group = slice(h * D, (h + 1) * D), (H + h // (H // K)) * D
            query = rotate(qkv[t, own], t)
            scores = np.array([query @ rotate(qkv[s, group : group + D], s) for s in range(t + 1)]) / math.sqrt(D)
            weights = np.exp(scores - scores.max())
            heads[t, own] = weights / weights.sum() @ qkv[: t + 1, group + K * D : group + K * D + D]
        x = x + linear(heads, f"blocks.{i}.attention.out_proj")
        y = norm(x, f"blocks.{i}.norm2")
        if c.ffn == "gelu":
            y = linear(y, f"blocks.{i}.ffn.up_proj")
            y = 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        else:
            y = linear(y, f"blocks.{i}.ffn.gate_up_proj")
            y = y[:, :F_] / (1 + np.exp(-y[:, :F_])) * y[:, F_:]
        x = x + linear(y, f"blocks.{i}.ffn.down_proj")
    return norm(x, "norm") @ w["head.weight"].T


KINDS = list(itertools.product(("rope", "learned", "sinusoidal", "none"), ("rmsnorm", "layernorm"), ("swiglu", "gelu"), (False, True)))


@pytest.mark.parametrize("position, norm, ffn, bias", KINDS)
def test_every_kind_of_model_equals_a_numpy_loop(position, norm, ffn, bias):
    kind = KINDS.index((position, norm, ffn, bias))  # walk through the other choices as well
    model = build(kind, position=position, norm=norm, ffn=ffn, bias=bias, n_layers=2, n_kv_heads=(4, 2, 1)[kind % 3],
                  tie_embeddings=kind % 5 < 3, backend=("math", "fused")[kind % 7 < 3])
    ids = random_ids(model, 2, 7)
    with torch.no_grad():
        ours = model(ids)
    theirs = torch.tensor(np.stack([numpy_logits(model, row) for row in ids.numpy()]))
    torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=0)
