"""The known-entropy language, its floor, and the tables: against enumerations, regular expressions and loops that know nothing of tinylm."""
import gzip
import itertools
import json
import math
import re
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinylm import corpus
from tinylm.corpus import KITE_WORDS, STORIES, Grammar, KnownEntropyLanguage, NGram, kite_stories, render, split_words

KITES = {
    "Story": ["red red=Thing blue blue=Thing Ask .", "blue blue=Thing red red=Thing Ask ."],
    "Ask": ["red $red", "blue $blue"],
    "Thing": ["kite", "boat"],
}
MINI = {  # rules and pools used twice, a register recalled twice, marks in the middle, ways of different length
    "Text": ["who=Name Mood , and other=Name Mood . End", "Once upon a Time . Close"],
    "End": ["Then $who , $other and $who went home .", "$other stayed !"],
    "Close": ["Wait ; there=Name Mood : $there !", "Rest"],
    "Mood": ["sang", "did not Verb"],
    "Rest": ["Nobody came ?"],
    "Verb": ["sing", "come", "dance"],
    "Time": ["time", "day"],
    "Name": ["Ada", "Leo", "Mia"],
}
always_the_same = settings(max_examples=150, deadline=None, derandomize=True)


def mini_texts():
    "Every text of MINI, with its derivation's (rule, alternative) choices, by loops written for this language."
    names, moods = ["Ada", "Leo", "Mia"], [("sang", []), *((f"did not {v}", [("Verb", i)]) for i, v in enumerate(("sing", "come", "dance")))]
    for (a, who), (b, other) in itertools.product(enumerate(names), repeat=2):
        for (m1, c1), (m2, c2) in itertools.product(moods, repeat=2):
            choices = [("Text", 0), ("Name", a), ("Mood", int(m1 != "sang")), *c1, ("Name", b), ("Mood", int(m2 != "sang")), *c2]
            yield f"{who} {m1}, and {other} {m2}. Then {who}, {other} and {who} went home.\n", [*choices, ("End", 0)]
            yield f"{who} {m1}, and {other} {m2}. {other} stayed!\n", [*choices, ("End", 1)]
    for t, time in enumerate(("time", "day")):
        for (n, there), (m, c) in itertools.product(enumerate(names), moods):
            choices = [("Text", 1), ("Time", t), ("Close", 0), ("Name", n), ("Mood", int(m != "sang")), *c]
            yield f"Once upon a {time}. Wait; {there} {m}: {there}!\n", choices
        yield f"Once upon a {time}. Nobody came?\n", [("Text", 1), ("Time", t), ("Close", 1), ("Rest", 0)]


def one_of(words):
    return "|".join(words)


HERO, FRIEND, COLOUR, THING, PLACE = (one_of(STORIES[name]) for name in ("Hero", "Friend", "Colour", "Thing", "Place"))
TAIL = (rf" The (?P=colour) (?P=thing) (?:blew to|rolled past|fell behind|vanished near) the (?P<place>{PLACE})\."
        rf" (?:(?P=hero) (?:met|found) (?P<f1>{FRIEND}) by the (?P=place)\.|There (?P<f2>{FRIEND}) (?:kept|guarded) the (?P=thing) for (?P=hero)\."
        rf"|Soon (?P<f3>{FRIEND}) brought (?P=hero) the (?P=thing)\.)"
        r" (?:Now (?P=hero) and (?P<g1>\w+) share the (?P=colour) (?P=thing)\.|(?P<g2>\w+) gave (?P=hero) the (?P=colour) (?P=thing) back\."
        r"|(?P=hero) hugged (?P<g3>\w+) and the (?P=colour) (?P=thing)\.|(?P=hero) and (?P<g4>\w+) took the (?P=thing) home\."
        r"|Home from the (?P=place) came the (?P=colour) (?P=thing)\.|Tonight the (?P=colour) (?P=thing) sleeps beside (?P=hero)\.)\n")
PATTERNS = [re.compile(rf"(?P<hero>{HERO}) (?:made|painted|had|won) a (?P<colour>{COLOUR}) (?P<thing>{THING})\." + TAIL),
            re.compile(rf"A (?P<colour>{COLOUR}) (?P<thing>{THING}) for (?P<hero>{HERO})!" + TAIL)]


def is_story(text):
    "Is this a text of STORIES? A regular expression with back references, which shares nothing with the parser."
    for pattern in PATTERNS:
        if match := pattern.fullmatch(text):
            friends = [match[name] for name in ("f1", "f2", "f3", "g1", "g2", "g3", "g4") if match[name]]
            return len(set(friends)) == 1
    return False


@pytest.fixture(scope="module")
def language():
    return KnownEntropyLanguage(seed=0)


@pytest.fixture(scope="module")
def documents(language):
    return language.documents(4000, seed=11)


# ---------------------------------------------------------------- the kite stories

def test_kite_stories_are_the_sixteen():
    rows = kite_stories()
    assert rows.dtype == torch.int64 and rows.shape == (16, 8) and KITE_WORDS == [".", "red", "blue", "kite", "boat"]
    texts = {" ".join(KITE_WORDS[i] for i in row) for row in rows.tolist()}
    expected = set()
    for red, blue, asked in itertools.product(("kite", "boat"), ("kite", "boat"), ("red", "blue")):
        answer = red if asked == "red" else blue
        expected |= {f". red {red} blue {blue} {asked} {answer} .", f". blue {blue} red {red} {asked} {answer} ."}
    assert texts == expected and len(texts) == 16


def test_kite_stories_come_in_the_order_of_the_coins():
    rows = kite_stories().tolist()
    assert rows[0] == [0, 1, 3, 2, 3, 1, 3, 0]
    assert rows[2] == [0, 1, 3, 2, 4, 1, 3, 0]  # the sentence of the course
    assert rows[15] == [0, 2, 4, 1, 4, 2, 4, 0]
    for number, (_, first, a, second, b, asked, _, _) in enumerate(rows):
        things = {first: a, second: b}
        assert number == 8 * (first == 2) + 4 * (things[1] == 4) + 2 * (things[2] == 4) + (asked == 2)


def test_kite_stories_are_fresh_each_time():
    kite_stories()[0, 0] = 3
    assert kite_stories()[0, 0] == 0


def test_kite_language_has_four_bits_and_sixteen_texts():
    kites = KnownEntropyLanguage(None, KITES)
    nats, size, rate = kites.entropy()
    assert math.isclose(nats, 4 * math.log(2)) and size == 29.5 and math.isclose(rate, 4 / 29.5)
    possible = [text for words in itertools.product(KITE_WORDS[1:], repeat=6) if kites.log_prob(text := " ".join(words) + ".\n") > -math.inf]
    told = {" ".join(KITE_WORDS[i] for i in row[1:7]) + ".\n" for row in kite_stories().tolist()}
    assert set(possible) == told and len(possible) == 16
    assert all(math.isclose(kites.log_prob(text), -4 * math.log(2)) for text in possible)


# ---------------------------------------------------------------- entropy and log_prob, by enumeration

@pytest.mark.parametrize("seed", [None, 0, 1, 7, 12345])
def test_a_language_written_out_completely(seed):
    mini = KnownEntropyLanguage(seed, MINI)
    texts = dict(mini_texts())
    assert len(texts) == 9 * 16 * 2 + 2 * (12 + 1)
    logs = {text: mini.log_prob(text) for text in texts}
    for text, choices in texts.items():  # the product of the choices, looked up by hand
        assert math.isclose(logs[text], sum(math.log(mini.probabilities[rule][i]) for rule, i in choices), rel_tol=1e-12)
    nats, size, rate = mini.entropy()
    assert abs(sum(map(math.exp, logs.values())) - 1) < 1e-12
    assert abs(-sum(math.exp(log) * log for log in logs.values()) - nats) < 1e-12
    assert abs(sum(math.exp(log) * len(text.encode()) for text, log in logs.items()) - size) < 1e-10
    assert math.isclose(rate, nats / math.log(2) / size, rel_tol=1e-12)


def test_sampled_texts_of_the_small_language_have_their_frequencies():
    mini = KnownEntropyLanguage(3, MINI)
    n = 20_000
    counts = Counter(mini.documents(n, seed=5))
    texts = [text for text, _ in mini_texts()]
    assert set(counts) <= set(texts)
    expected = np.array([n * math.exp(mini.log_prob(text)) for text in texts])
    observed = np.array([counts[text] for text in texts])
    chi2 = ((observed - expected) ** 2 / expected).sum()
    freedom = len(texts) - 1
    assert abs(chi2 - freedom) < 5 * (2 * freedom) ** 0.5  # 313 ± 125


def test_entropy_of_the_stories_by_a_formula_written_out(language):
    p = language.probabilities
    h = {rule: -sum(x * math.log(x) for x in p[rule]) for rule in p}
    length = {pool: sum(x * len(word) for x, word in zip(p[pool], STORIES[pool])) for pool in ("Hero", "Friend", "Colour", "Thing", "Place")}
    opening, finding, ending, thanks = p["Opening"], p["Finding"], p["Ending"], p["Thanks"]
    nats = sum(h[rule] for rule in ("Opening", "Hero", "Colour", "Thing", "Flew", "Place", "Finding", "Friend", "Ending"))
    nats += opening[0] * h["Made"] + finding[0] * h["Met"] + finding[1] * h["Kept"] + ending[2] * h["Thanks"]
    assert math.isclose(language.entropy().nats_per_document, nats, rel_tol=1e-12)
    hero, friend, colour, thing, place = length.values()
    words = {rule: sum(x * len(word) for x, word in zip(p[rule], STORIES[rule])) for rule in ("Made", "Flew", "Met", "Kept")}
    size = opening[0] * (hero + words["Made"] + colour + thing + len("  a  . ")) + opening[1] * (colour + thing + hero + len("A   for ! "))
    size += len("The    the . ") + colour + thing + words["Flew"] + place
    size += finding[0] * (hero + words["Met"] + friend + place + len("   by the . "))
    size += finding[1] * (friend + words["Kept"] + thing + hero + len("There   the  for . ")) + finding[2] * (friend + hero + thing + len("Soon  brought  the . "))
    size += ending[0] * (hero + friend + colour + thing + len("Now  and  share the  .")) + ending[1] * (friend + hero + colour + thing + len(" gave  the   back."))
    size += ending[2] * (hero + friend + thing + thanks[0] * (colour + len(" hugged  and the  .")) + thanks[1] * len(" and  took the  home."))
    size += ending[3] * (place + colour + thing + len("Home from the  came the  .")) + ending[4] * (colour + thing + hero + len("Tonight the   sleeps beside ."))
    assert math.isclose(language.entropy().bytes_per_document, size + 1, rel_tol=1e-12)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_mean_cost_and_length_of_a_sample_are_within_four_standard_errors(seed):
    some = KnownEntropyLanguage(seed)
    sample = some.documents(6000, seed=seed + 100)
    for values, exact in ((np.array([-some.log_prob(d) for d in sample]), some.entropy().nats_per_document),
                          (np.array([len(d.encode()) for d in sample]), some.entropy().bytes_per_document)):
        assert abs(values.mean() - exact) < 4 * values.std() / len(sample) ** 0.5


def test_words_are_drawn_with_their_probabilities(language, documents):
    heroes = Counter(re.match(rf"({HERO}) |A \w+ \w+ for ({HERO})", document)[0].split()[-1] for document in documents)
    for hero, p in zip(STORIES["Hero"], language.probabilities["Hero"]):
        assert abs(heroes[hero] - len(documents) * p) < 4.5 * (len(documents) * p * (1 - p)) ** 0.5


# ---------------------------------------------------------------- seeds

def test_the_language_of_seed_0_is_pinned(language):
    assert language.entropy() == pytest.approx((15.381724992368271, 137.44250091643684, 0.16145761477593779), abs=1e-12)
    assert language.documents(2, seed=4) == [
        "A red puppet for Ella! The red puppet rolled past the garden. Ella found Ida by the garden. Tonight the red puppet sleeps beside Ella.\n",
        "Nora had a green boat. The green boat rolled past the harbor. Nora found Rosa by the harbor. Rosa gave Nora the green boat back.\n"]


def test_a_seed_decides_everything():
    for seed in (0, 5):
        one, two = KnownEntropyLanguage(seed), KnownEntropyLanguage(seed)
        assert one.probabilities == two.probabilities and one.documents(50, 9) == two.documents(50, 9)
    assert KnownEntropyLanguage().probabilities == KnownEntropyLanguage(0).probabilities


def test_other_seeds_give_other_probabilities_and_the_same_words():
    languages = [KnownEntropyLanguage(seed) for seed in range(4)]
    assert len({some.entropy() for some in languages}) == 4
    assert len({tuple(some.documents(20, 9)) for some in languages}) == 4
    document = languages[0].documents(1, 1)[0]
    assert len({some.log_prob(document) for some in languages}) == 4 and all(some.log_prob(document) > -math.inf for some in languages)


def test_a_sample_does_not_disturb_other_chance(language):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    language.documents(3, seed=2)
    KnownEntropyLanguage(seed=3)
    KnownEntropyLanguage(seed=None, grammar=KITES)
    assert torch.equal(torch.get_rng_state(), before)


def test_documents_are_document_after_document(language):
    generator = torch.Generator().manual_seed(8)
    ten = language.documents(10, seed=8)
    assert [language.document(generator) for _ in range(10)] == ten == language.documents(12, seed=8)[:10]
    assert len(set(ten)) == 10 and language.documents(0, seed=8) == []


@pytest.mark.parametrize("seed", [None, 0, 3])
def test_no_alternative_is_rare(seed):
    for p in KnownEntropyLanguage(seed).probabilities.values():
        assert math.isclose(sum(p), 1) and min(p) > 0.3 / 1.3 / len(p)
        assert seed is not None or max(p) == pytest.approx(min(p), abs=1e-12)


# ---------------------------------------------------------------- text, byte for byte

def test_documents_are_stories_of_thirty_words(documents):
    for document in documents:
        assert is_story(document) and document.isascii() and document.count("\n") == 1
        assert 30 <= len(split_words(document)) <= 32 and 110 <= len(document) <= 165
    assert len(set(documents)) > 0.99 * len(documents)


def test_every_document_can_be_read(language, documents):
    logs = [language.log_prob(document) for document in documents]
    assert -25 < min(logs) and max(logs) < -9


FORBIDDEN = {
    "no newline": lambda d: d[:-1], "two newlines": lambda d: d + "\n", "two documents": lambda d: d + d, "nothing": lambda d: "", "only a newline": lambda d: "\n",
    "space in front": lambda d: " " + d, "space behind": lambda d: d[:-1] + " \n", "two spaces": lambda d: d.replace(" ", "  ", 1),
    "space before the stop": lambda d: d.replace(".", " .", 1), "no space": lambda d: d.replace(" ", "", 1), "tab": lambda d: d.replace(" ", "\t", 1),
    "lower case": str.lower, "Windows line end": lambda d: d.replace("\n", "\r\n"), "cut": lambda d: d[: len(d) // 2], "first word gone": lambda d: d.split(" ", 1)[1],
    "another stop": lambda d: d.replace(".", "!", 1), "hidden character": lambda d: "\ufeff" + d, "digit": lambda d: d.replace(" ", "1 ", 1),
    "backwards": lambda d: d[::-1], "accent": lambda d: d.replace("a", "á", 1), "grammar": lambda d: "Story", "register": lambda d: d.replace("the", "$hero", 1),
}


@pytest.mark.parametrize("edit", FORBIDDEN, ids=str)
def test_another_rendering_is_impossible(edit, language, documents):
    for document in documents[:30]:
        assert language.log_prob(document) > -math.inf and language.log_prob(FORBIDDEN[edit](document)) == -math.inf


VOCABULARY = sorted({word for alternatives in STORIES.values() for a in alternatives for word in split_words(a) if word not in STORIES} - {"Colour"}) + [".", "!", "\n"]


@always_the_same
@given(st.integers(0, 3999), st.integers(0, 31), st.sampled_from(VOCABULARY))
def test_changing_a_word_gives_a_story_or_nothing(documents, language, number, place, word):
    words = split_words(documents[number])
    words[place % len(words)] = word
    changed = render(words)
    assert (language.log_prob(changed) > -math.inf) == is_story(changed)


@always_the_same
@given(st.integers(0, 3999), st.integers(0, 31), st.sampled_from(["drop", "double", "swap"]))
def test_moving_a_word_gives_a_story_or_nothing(documents, language, number, place, how):
    words = split_words(documents[number])
    i = place % (len(words) - 1)
    words[i : i + 2] = {"drop": words[i + 1 : i + 2], "double": [words[i], *words[i : i + 2]], "swap": [words[i + 1], words[i]]}[how]
    changed = render(words)
    assert (language.log_prob(changed) > -math.inf) == is_story(changed)


@pytest.mark.parametrize("pool", ["Hero", "Colour", "Thing", "Place", "Friend"])
def test_a_recall_is_enforced_at_its_last_mention(pool, language, documents):
    checked = 0
    for document in documents[:200]:
        words = split_words(document)
        places = [i for i, word in enumerate(words) if word in STORIES[pool]]
        if len(places) < 2:
            continue
        for other in STORIES[pool]:
            if other != words[places[0]]:
                assert language.log_prob(render([*words[: places[-1]], other, *words[places[-1] + 1 :]])) == -math.inf
                checked += 1
    assert checked > 300


@always_the_same
@given(st.lists(st.one_of(st.text("abcXYZ", min_size=1, max_size=5), st.sampled_from(list(".,;:!?\n"))), max_size=20))
def test_split_words_undoes_render(words):
    text = render(words)
    assert split_words(text) == words
    assert not re.search(r"  | [.,;:!?\n]", text)


def test_the_last_word_needs_a_memory_longer_than_five_words(language, documents):
    far = [0, 0]
    for document in documents[:500]:
        words = split_words(document)
        thing = next(word for word in words if word in STORIES["Thing"])
        last = len(words) - 1 - words[::-1].index(thing)
        far[thing not in words[last - 4 : last]] += 1
    assert far[1] > 4 * far[0]


# ---------------------------------------------------------------- grammars that are refused

BAD = {
    "two alternatives start alike": ({"S": ["a b", "a c"]}, "two derivations"),
    "alike through a rule": ({"S": ["A x", "b y"], "A": ["b", "c"]}, "S: two alternatives start with 'b'"),
    "alike through a pool": ({"S": ["r=P x", "b y"], "P": ["b", "c"]}, "S: two alternatives start with 'b'"),
    "alike through a recall": ({"S": ["r=P T"], "T": ["$r x", "b y"], "P": ["b", "c"]}, "T: two alternatives start with 'b'"),
    "two recalls of one pool": ({"S": ["r=P q=P T"], "T": ["$r x", "$q y"], "P": ["b", "c"]}, "T: two alternatives start"),
    "a word twice in a pool": ({"S": ["r=P ."], "P": ["b", "b"]}, "P: two alternatives"),
    "recall without bind": ({"S": ["a $r"]}, "recalled before it is bound"),
    "recall before bind": ({"S": ["a $r r=P"], "P": ["b"]}, "recalled before it is bound"),
    "bound on one path only": ({"S": ["A $r"], "A": ["r=P", "c"], "P": ["b"]}, "recalled before it is bound"),
    "bound twice": ({"S": ["r=P a r=P"], "P": ["b", "c"]}, "bound twice"),
    "bound twice on one path": ({"S": ["A r=P"], "A": ["r=P", "c"], "P": ["b"]}, "bound twice"),
    "bound again inside a rule": ({"S": ["A A"], "A": ["r=P"], "P": ["b"]}, "bound twice"),
    "two pools for a register": ({"S": ["a r=P $r", "b r=Q $r"], "P": ["x"], "Q": ["y"]}, "one pool"),
    "recursion": ({"S": ["a S", "b"]}, "further down"),
    "recursion through another": ({"S": ["a T", "b"], "T": ["c S"]}, "further down"),
    "a rule above": ({"S": ["U T"], "T": ["b"], "U": ["T c"]}, "further down"),
    "a pool above itself": ({"S": ["P x"], "P": ["a r=P"]}, "further down"),
    "a bind of no rule": ({"S": ["r=Nobody x"]}, "not a pool"),
    "a pool of two words": ({"S": ["r=P x"], "P": ["a b", "c"]}, "not a pool"),
    "a pool of marks": ({"S": ["r=P x"], "P": ["a", "!"]}, "not a pool"),
    "a pool of rules": ({"S": ["r=P x"], "P": ["Q"], "Q": ["a"]}, "not a pool"),
    "a rule never used": ({"S": ["a"], "T": ["b"]}, "no rule uses T"),
    "a misspelt rule": ({"S": ["a Colours"], "Colour": ["red"]}, "no rule uses Colour"),
    "a mark in a word": ({"S": ["end."]}, "'end.' in S"), "a digit": ({"S": ["4"]}, "'4' in S"), "an apostrophe": ({"S": ["it's"]}, "in S"),
    "an accent": ({"S": ["café"]}, "in S"), "an accent in a pool": ({"S": ["r=P"], "P": ["é"]}, "in P"), "two marks": ({"S": ["a ?!"]}, "in S"),
    "no register name": ({"S": ["=P"], "P": ["a"]}, "in S"), "a large register": ({"S": ["R=P"], "P": ["a"]}, "in S"), "only a dollar": ({"S": ["a $"]}, "\\$"),
    "a mark in front": ({"S": [". a", "b"]}, "starts with a word"),
    "no rules": ({}, "no rules"), "no alternatives": ({"S": []}, "needs alternatives"), "an empty alternative": ({"S": ["a", " "]}, "needs alternatives"),
}


@pytest.mark.parametrize("name", BAD, ids=str)
def test_a_bad_grammar_is_refused(name):
    grammar, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        Grammar(grammar)
    with pytest.raises(ValueError, match=message):
        KnownEntropyLanguage(0, grammar)


@pytest.mark.parametrize("wrong", ["S: a", ["a"], {"S": "a b"}, {"S": ("a",)}, {"S": [["a"]]}, {1: ["a"]}, {"S": [None]}, None], ids=str)
def test_another_form_is_a_type_error(wrong):
    with pytest.raises(TypeError, match="grammar must be a dict"):
        KnownEntropyLanguage(0, wrong)


@pytest.mark.parametrize("grammar", [
    {"S": ["hello"]}, {"S": ["A A A"], "A": ["x", "y"]}, {"S": ["a T", "b T"], "T": ["c", "d"]},
    {"S": ["a r=P T", "b r=P T"], "T": ["c $r $r"], "P": ["x", "y"]},  # one register, bound on either path
    {"S": ["r=P $r q=P $q"], "P": ["x", "y"]}, {"S": ["a ! b ; c , d : e ?"]},
], ids=str)
def test_a_good_grammar_sums_to_one(grammar):
    some = KnownEntropyLanguage(1, grammar)
    seen = {}
    for document in some.documents(400, 1):
        seen[document] = math.exp(some.log_prob(document))
    assert math.isclose(sum(seen.values()), 1)
    assert math.isclose(-sum(p * math.log(p) for p in seen.values()), some.entropy().nats_per_document, abs_tol=1e-12)
    assert math.isclose(sum(p * len(d) for d, p in seen.items()), some.entropy().bytes_per_document)


def test_a_grammar_of_one_text_has_no_entropy():
    nats, size, rate = KnownEntropyLanguage(0, {"S": ["hello , you !"]}).entropy()
    assert (nats, size, rate) == (0, len("hello, you!\n"), 0)


def test_the_grammar_handed_in_is_not_kept():
    mine = {"S": ["a", "b"]}
    some = KnownEntropyLanguage(0, mine)
    mine["S"].append("c")
    assert some.log_prob("c\n") == -math.inf and set(some.documents(50, 0)) == {"a\n", "b\n"}


# ---------------------------------------------------------------- bad arguments

@pytest.mark.parametrize("seed, error", [(-1, ValueError), (2**63, ValueError), (1.0, TypeError), ("0", TypeError), (True, TypeError)])
def test_a_bad_seed_is_named(seed, error, language):
    with pytest.raises(error, match="seed must be"):
        KnownEntropyLanguage(seed)
    with pytest.raises(error, match="seed must be"):
        language.documents(1, seed)


def test_documents_needs_a_seed_and_a_count(language):
    for n, error in ((-1, ValueError), (2.0, TypeError), (None, TypeError), (True, TypeError)):
        with pytest.raises(error, match="n must be"):
            language.documents(n, 0)
    with pytest.raises(TypeError, match="seed must be"):
        language.documents(3, None)


@pytest.mark.parametrize("wrong", [None, 0, "seed", torch])
def test_document_needs_a_generator(wrong, language):
    with pytest.raises(TypeError, match="generator must be a torch.Generator"):
        language.document(wrong)


@pytest.mark.parametrize("wrong", [None, b"Mia\n", ["Mia"], 3])
def test_log_prob_needs_text(wrong, language):
    with pytest.raises(TypeError, match="document must be a str"):
        language.log_prob(wrong)


# ---------------------------------------------------------------- tables

def witten_bell(sequences, order, context, token):
    "p(token | context) straight from the definition, by reading all sequences again for every question."
    known = {t for s in sequences for t in s}
    p = 1 / (len(known) + 1)
    for length in range(order):
        wanted = tuple(context[len(context) - length :])
        followers = []
        for sequence in sequences:
            padded = [None] * (order - 1) + list(sequence)
            followers += [padded[i] for i in range(order - 1, len(padded)) if tuple(padded[i - length : i]) == wanted]
        if followers:
            kinds = len(set(followers))
            p = (followers.count(token) + kinds * p) / (len(followers) + kinds)
    return p


sequences_of_letters = st.lists(st.text("abc", max_size=6), min_size=1, max_size=5).filter(lambda s: any(s))


@always_the_same
@given(sequences_of_letters, st.lists(st.text("abcd", max_size=6), max_size=4), st.integers(1, 4))
def test_ngram_equals_the_definition(train, test, order):
    expected = 0.0
    for sequence in test:
        padded = [None] * (order - 1) + list(sequence)
        for i in range(order - 1, len(padded)):
            expected -= math.log2(witten_bell(train, order, padded[i - order + 1 : i], padded[i]))
    assert math.isclose(NGram(order).fit(train).bits(test), expected, rel_tol=1e-12, abs_tol=1e-12)


@always_the_same
@given(sequences_of_letters, st.text("abcd", max_size=3), st.integers(1, 4))
def test_ngram_probabilities_sum_to_one(train, context, order):
    table = NGram(order).fit(train)
    context = ((None,) * order + tuple(context))[-(order - 1) :] if order > 1 else ()
    tokens = [*{t for s in train for t in s}, "something new"]
    assert math.isclose(sum(table.probability((*context, token)) for token in tokens), 1)


def test_ngram_by_hand():
    lines = [["red", "kite"], ["red", "boat"], ["red", "kite"]]
    kite, red_first = 11 / 36, (3 + 1 * (3 + 3 / 4) / 9) / (3 + 1)
    assert math.isclose(NGram(1).fit(lines).bits([["kite"]]), -math.log2(kite))
    assert math.isclose(NGram(2).fit(lines).bits([["red", "kite"]]), -math.log2(red_first * 47 / 90))
    new = 3 / 4 / 9
    assert math.isclose(NGram(1).fit(lines).bits([["unheard"]]), -math.log2(new))
    assert math.isclose(NGram(2).fit(lines).bits([["red", "unheard"]]), -math.log2(red_first * (2 * new) / 5))


def test_ngram_takes_ids_tensors_bytes_and_generators():
    rows = kite_stories()
    lists, words = rows.tolist(), [[KITE_WORDS[i] for i in row] for row in rows.tolist()]
    results = {round(NGram(3).fit(form).bits(form), 9) for form in (lists, rows, rows.numpy(), words, [bytes(row) for row in lists])}
    assert len(results) == 1 and NGram(3).fit(row for row in rows).bits(row for row in lists) == pytest.approx(results.pop())


def test_ngram_adds_up_and_forgets():
    table = NGram(2).fit(["abab", "abba"])
    assert math.isclose(table.bits(["ab", "ba", "zz"]), sum(table.bits([s]) for s in ("ab", "ba", "zz")))
    assert table.bits([]) == 0 == table.bits([[]])
    assert table.fit(["bbbb"]) is table and math.isclose(table.bits(["ab"]), NGram(2).fit(["bbbb"]).bits(["ab"]))


def test_ngram_sees_the_past_of_its_own_sequence_only():
    table = NGram(3).fit(["abc", "bca", "cab"])
    assert not math.isclose(table.bits(["abcabc"]), table.bits(["abc", "abc"]))
    ends = [table.bits(["abc"[:n]]) for n in range(4)]  # the cost of a beginning does not depend on what follows
    assert ends == sorted(ends) and math.isclose(ends[3] - ends[2], -math.log2(table.probability(("a", "b", "c"))))


@pytest.mark.parametrize("order, error", [(0, ValueError), (-1, ValueError), (1.0, TypeError), ("2", TypeError), (None, TypeError), (True, TypeError)])
def test_a_bad_order_is_named(order, error):
    with pytest.raises(error, match="order must be"):
        NGram(order)


def test_ngram_without_counts_is_an_error():
    with pytest.raises(ValueError, match="fit"):
        NGram(2).bits(["a"])
    for empty in ([], [[]], ["", ""]):
        with pytest.raises(ValueError, match="no token"):
            NGram(2).fit(empty)


# ---------------------------------------------------------------- the floor

def kite_bits(order):
    "Bits per story of the best table of an order: conditional counts over all sixteen stories."
    rows = kite_stories().tolist()
    after = defaultdict(Counter)
    for row in rows:
        for t in range(1, 8):
            after[tuple(row[max(0, t - order + 1) : t])][row[t]] += 1
    return sum(n * math.log2(c.total() / n) for c in after.values() for n in c.values()) / 16, len(after)


@pytest.mark.parametrize("order, bits, rows", [(1, 16.1417, 1), (2, 8.7549, 5), (3, 8.2863, 11), (4, 6.4024, 23), (5, 5.3774, 39), (6, 4.0, 51)])
def test_kite_ladder(order, bits, rows):
    found, n = kite_bits(order)
    assert (round(found, 4), n) == (bits, rows)
    # an interpolated table that has read the stories a thousand times comes down to the same step (the opening stop costs next to nothing)
    many = [row for row in kite_stories().tolist() for _ in range(1000)]
    table = NGram(order).fit(many if order > 1 else [row[1:] for row in many])
    scored = kite_stories() if order > 1 else kite_stories()[:, 1:]
    assert abs(table.bits(scored) / 16 - found) < 0.05


def test_tables_and_floor_stand_apart(language):
    train, validation = language.documents(8000, seed=2), language.documents(500, seed=3)
    floor = -sum(map(language.log_prob, validation)) / math.log(2)
    for cut in (split_words, str.encode):
        one, two, five = (NGram(order).fit(map(cut, train)).bits(map(cut, validation)) for order in (1, 2, 5))
        assert one > 1.4 * two > 1.4 * 1.4 * five > 1.4 * 1.4 * 1.5 * floor


def test_a_table_never_convicts_unless_it_was_counted_on_the_judges(language):
    train, validation = language.documents(3000, seed=2), language.documents(60, seed=3)
    threshold = -sum(map(language.log_prob, validation)) - math.log(1e6)  # below: proof of a leak
    for order in (1, 2, 5, 9):
        assert NGram(order).fit(map(split_words, train)).bits(map(split_words, validation)) * math.log(2) > threshold
    cheat = NGram(32).fit(map(split_words, validation))
    assert cheat.bits(map(split_words, validation)) * math.log(2) < threshold


# ---------------------------------------------------------------- the log

def test_compressor_log(local_data):
    log = json.loads((Path(__file__).parent.parent / "data/runs/compressors.json").read_text())
    books = corpus.gutenberg("val", raw_dir=local_data / "gutenberg_raw")
    text = "".join(books.values()).encode()
    assert log["books"] == list(books) and log["bytes"] == len(text)
    frequencies = np.array(list(Counter(text).values())) / len(text)
    assert log["bits_per_byte"]["byte frequency"] == pytest.approx(-(frequencies * np.log2(frequencies)).sum(), abs=1e-4)
    assert log["bits_per_byte"]["gzip"] == pytest.approx(8 * len(gzip.compress(text, 9)) / len(text), abs=0.02)
