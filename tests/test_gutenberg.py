"""The Gutenberg books: fetched whole or not at all, checked by fingerprint, cleaned of everything that is not the book."""
import csv
import hashlib
import logging
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pooch
import pytest

from tinylm import corpus
from tinylm.corpus import BOOKS, Book, clean_book, gutenberg

HEADER = "The Project Gutenberg EBook of The Kite, by Zoe Bach\n\nThis eBook is for the use of anyone anywhere.\n\n"
START = "*** START OF THIS PROJECT GUTENBERG EBOOK THE KITE ***"
END = "*** END OF THIS PROJECT GUTENBERG EBOOK THE KITE ***"
LICENCE = "\n\nSection 1. General Terms of Use. Donations to www.gutenberg.org are welcome.\n"
STORY = "THE KITE\n\nby Zoë Bach\n\n\n“Let go—now!” cried the boy.\n\nAnd the red kite flew.\n"


def published(story=STORY, *, encoding=None, start=START, end=END, credit="Produced by A. Volunteer"):
    "A file as Project Gutenberg would publish it, as text."
    declared = f"Character set encoding: {encoding}\n\n" if encoding else ""
    return f"{HEADER}{declared}{start}\n\n\n\n\n{credit}\n\n\n\n\n{story}\n\n\n\n{end}{LICENCE}"


# ---------------------------------------------------------------- encodings and line ends

@pytest.mark.parametrize("declared, codec", [
    ("UTF-8", "utf-8"), ("UTF-8", "utf-8-sig"), (None, "utf-8"), (None, "utf-8-sig"),
    ("ISO-8859-1", "utf-8"),  # the bytes are the better witness
    ("ISO-8859-1", "cp1252"), ("Windows-1252", "cp1252"), (None, "cp1252"), ("UTF-8", "cp1252"),
    ("ASCII", "cp1252"), ("ISO-646-US (US-ASCII)", "cp1252"), ("no-such-table", "cp1252"), ("hex", "cp1252"),
])
def test_every_encoding_gives_the_same_text(declared, codec):
    assert clean_book(published(encoding=declared).encode(codec)) == STORY


def test_utf8_is_tried_first_also_where_another_table_would_accept_it():
    story = "Zoë — née “Bach\n"  # its UTF-8 bytes are eight accented letters and signs more in Windows-1252
    raw = published(story, encoding="ISO-8859-1").encode()
    assert raw.decode("cp1252") and clean_book(raw) == story


def test_the_declared_table_is_used_where_it_is_not_utf8():
    story = "Žluťoučký kůň\n"
    assert clean_book(published(story, encoding="ISO-8859-2").encode("iso-8859-2")) == story


def test_a_byte_unknown_to_cp1252_falls_back_to_latin_1():
    story = "caf\xe9 \x81\n"
    assert clean_book(published(story, encoding="ISO-8859-1").encode("latin-1")) == story


def test_no_byte_order_mark_is_left_in_front_of_a_file():
    text = clean_book(b"\xef\xbb\xbf" + published(credit="").encode())
    assert text == STORY and "\ufeff" not in text


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_line_ends_of_every_system(newline):
    assert clean_book(published().replace("\n", newline).encode()) == STORY


def test_blanks_are_evened_out():
    story = "One.  \t\n\xa0Two.\xa0\n\n\n\n\n\n\n\nThree.\n\n\nFour.\n\nFive.\n"
    assert clean_book(published(story).encode()) == "One.\n Two.\n\n\nThree.\n\n\nFour.\n\nFive.\n"


@pytest.mark.parametrize("wrong", ["text", None, 7, ["lines"]])
def test_what_is_not_bytes_is_a_type_error(wrong):
    with pytest.raises(TypeError, match="raw must be bytes"):
        clean_book(wrong)


# ---------------------------------------------------------------- header and footer

@pytest.mark.parametrize("start", [
    START, "***START OF THE PROJECT GUTENBERG EBOOK THE KITE***", "*** START OF THE PROJECT GUTENBERG EBOOK THE KITE ***",
    "*** START OF THIS PROJECT GUTENBERG ETEXT THE KITE ***", "*** Start of this Project Gutenberg eBook The Kite ***",
    "*** START OF THE PROJECT GUTENBERG EBOOK THE KITE; OR,\nTHE BOY WHO LET GO ***",
    "*** START**THE SMALL PRINT!**FOR PUBLIC DOMAIN ETEXTS**START***\nWhy is this here?\n"
    "*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*",
    "*END THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*",
    START + "\n\nThe Small Print follows.\n\n*END*THE SMALL PRINT! FOR PUBLIC DOMAIN EBOOKS*Ver.02/11/02*END*",
])
def test_every_form_of_the_header(start):
    assert clean_book(published(start=start).encode()) == STORY


@pytest.mark.parametrize("end", [
    END, "***END OF THE PROJECT GUTENBERG EBOOK THE KITE***", "End of Project Gutenberg's The Kite, by Zoe Bach",
    "End of the Project Gutenberg EBook of The Kite, by Zoe Bach\n\n" + END, "End of Project Gutenberg’s The Kite, by\nZoe Bach\n\n" + END,
    "End of The Project Gutenberg Etext of The Kite", "End of this Project Gutenberg Etext of The Kite",
    "[End of the Project Gutenberg EBook of The Kite]\n\n*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*",
])
def test_every_form_of_the_footer(end):
    assert clean_book(published(end=end).encode()) == STORY


@pytest.mark.parametrize("faulty", [
    b"", b"\xef\xbb\xbf", STORY.encode(), published().split(START)[1].encode(), published().split(END)[0].encode(),
    b"<html><body>404: Not Found</body></html>", (END + "\n\n" + START + "\n\nA kite.\n").encode(),
], ids=["empty", "only a mark", "no markers", "no START", "no END: a cut file", "a web page", "END before START"])
def test_a_file_without_both_markers_is_refused(faulty):
    with pytest.raises(ValueError, match="START marker followed by an END marker"):
        clean_book(faulty)


def test_words_like_a_marker_inside_a_sentence_cut_nothing():
    story = "He came to the end of the project, Gutenberg or not.\n\nShe read *** START OF SOMETHING *** aloud.\n\nThe end of the first book.\n\nOn.\n"
    assert clean_book(published(story).encode()) == story


# ---------------------------------------------------------------- what is not by the author

@pytest.mark.parametrize("credit", [
    "", "Produced by A. Volunteer", "Produced by A. Volunteer,\nB. Volunteer and the Online Distributed\nProofreading Team",
    "E-text prepared by A. Volunteer", "Etext prepared by A. Volunteer", "This etext was prepared by A. Volunteer",
    "Transcribed from the 1910 edition by A. Volunteer, email\nab01@pglaf.org", "Produced by A. Volunteer.  HTML version by B. Volunteer.",
    "Scanned and proofed by A. Volunteer\n\nHTML version by B. Volunteer", "Special thanks are due to A. Volunteer for\nproofreading.",
    "[Transcriber's Note: the spelling is\nthe author's own.]", "Transcriber’s Notes:\n\nItalics are marked\nby underscores.",
    "Original Transcriber's Note\n\n\n\n\nA combination of\ntwo etexts.", "[Project Gutenberg Editor's Note: there is\nanother version.]",
])
def test_credits_and_notes_go(credit):
    assert clean_book(published(credit=credit).encode()) == STORY


def test_a_credit_is_only_a_credit_in_front():
    story = "I asked.\n\nProduced by nature, said he.\n\nTranscribed from memory.\n"
    assert clean_book(published(story).encode()) == story


@pytest.mark.parametrize("tag", ["[Illustration]", "[Illustration: a kite\non a string]", "      [Illustration: kite [_Copyright 1894_]]"])
def test_picture_tags_go_and_other_brackets_stay(tag):
    assert clean_book(published(f"One.\n\n{tag}\n\nTwo [sic].\n").encode()) == "One.\n\nTwo [sic].\n"


@pytest.mark.parametrize("heading", ["CONTENTS", "Contents.", "ILLUSTRATIONS", "LIST OF ILLUSTRATIONS"])
def test_a_list_in_its_own_section_goes(heading):
    story = f"THE KITE\n\n\n\n\n{heading}\n\nI. The Wind    3\n\nII. The String    9\n\n\n\n\nI. The Wind\n\nIt blew.\n"
    assert clean_book(published(story).encode()) == "THE KITE\n\n\nI. The Wind\n\nIt blew.\n"


def test_a_section_too_long_for_a_list_is_the_book_itself():
    story = "CONTENTS\n\nI. The Wind\n\n" + "It blew and blew.\n" * 400
    assert clean_book(published(story).encode()) == story


def test_advertisements_after_the_end_go_and_an_early_end_cuts_nothing():
    assert clean_book(published("A.\n\n   THE END\n\n* * *\n\nMore stories of the sort you like!\n").encode()) == "A.\n\n   THE END\n"
    assert clean_book(published("A.\n\nFINIS\n").encode()) == "A.\n\nFINIS\n"
    long = "Part one.\n\nTHE END\n\n" + "But it was not.\n" * 400
    assert clean_book(published(long).encode()) == long


# ---------------------------------------------------------------- fetching: a server of our own on 127.0.0.1

class Shelf:
    "What the server answers: per path a list of (status, body, declared length), the last one for ever; and what it was asked."

    def __init__(self):
        self.answers, self.asked = {}, []

    def put(self, path, *answers):
        self.answers[path] = [(*answer, len(answer[1]))[:3] for answer in answers]

    def take(self, path):
        self.asked.append(path)
        left = self.answers.get(path, [(404, b"Not Found", 9)])
        return left.pop(0) if len(left) > 1 else left[0]


@pytest.fixture
def shelf(monkeypatch):
    shelf = Shelf()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, body, length = shelf.take(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    shelf.url = f"http://127.0.0.1:{server.server_port}"
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)
    yield shelf
    server.shutdown()
    server.server_close()
    thread.join()


RAW = {slug: published(f"{slug}: “a story”.\n").encode() for slug in ("one", "two", "three")}


@pytest.fixture
def books(shelf, monkeypatch):
    "Three small books on the shelf, and BOOKS pointing there."
    table = tuple(Book(slug, f"The Book {slug.title()}", "Zoe Bach", number, split, f"{shelf.url}/a%20kite/{slug}.txt", hashlib.sha256(RAW[slug]).hexdigest())
                  for number, (slug, split) in enumerate([("one", "train"), ("two", "val"), ("three", "train")], 1))
    for book in table:
        shelf.put(f"/a%20kite/{book.slug}.txt", (200, RAW[book.slug]))
    monkeypatch.setattr(corpus, "BOOKS", table)
    return table


def story(slug):
    return f"{slug}: “a story”.\n"


def files(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("split, slugs", [("train", ["one", "three"]), ("val", ["two"]), ("all", ["one", "two", "three"])])
def test_each_split_holds_its_whole_books_in_table_order(books, tmp_path, split, slugs):
    got = gutenberg(split, cache_dir=tmp_path)
    assert got == {slug: story(slug) for slug in slugs} and list(got) == slugs


def test_the_default_is_the_training_split(books, tmp_path):
    assert list(gutenberg(cache_dir=str(tmp_path))) == ["one", "three"]


def test_a_second_call_asks_the_server_nothing(books, shelf, tmp_path):
    first = gutenberg("all", cache_dir=tmp_path)
    assert len(shelf.asked) == 3
    assert gutenberg("all", cache_dir=tmp_path) == first and len(shelf.asked) == 3
    assert files(tmp_path) == ["1.txt", "2.txt", "3.txt"] and (tmp_path / "2.txt").read_bytes() == RAW["two"]


def test_the_cache_of_the_user_is_the_default(books, tmp_path, monkeypatch):
    monkeypatch.setattr("pooch.os_cache", lambda name: tmp_path / name)
    gutenberg("val")
    assert files(tmp_path / "tinylm") == ["2.txt"]


def test_a_missing_cache_folder_is_made(books, tmp_path):
    assert gutenberg("val", cache_dir=tmp_path / "a" / "b") == {"two": story("two")}


@pytest.mark.parametrize("damage", [b"", b"half a bo", RAW["one"]], ids=["empty", "cut", "another book"])
def test_a_broken_cached_file_is_fetched_again(books, shelf, tmp_path, damage):
    (tmp_path / "2.txt").write_bytes(damage)
    assert gutenberg("val", cache_dir=tmp_path) == {"two": story("two")}
    assert len(shelf.asked) == 1 and (tmp_path / "2.txt").read_bytes() == RAW["two"]


def refused(error, call, *words):
    "The call raises `error` with a message of one line that holds the words."
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


FAULTS = {
    "page missing": (OSError, (404, b"Not Found")),
    "server broken": (OSError, (500, b"Sorry")),
    "cut mid-file": (OSError, (200, RAW["two"][:100], len(RAW["two"]))),
    "cut before the first byte": (OSError, (200, b"", len(RAW["two"]))),
    "one byte changed": (ValueError, (200, RAW["two"].replace(b"story", b"stary"))),
    "a web page instead": (ValueError, (200, b"<html>Please log in</html>")),
    "empty": (ValueError, (200, b"")),
    "cut, and the length says so": (ValueError, (200, RAW["two"][:100])),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_download_is_one_clear_line_and_leaves_nothing(books, shelf, tmp_path, fault):
    error, answer = FAULTS[fault]
    shelf.put("/a%20kite/two.txt", answer)
    refused(error, lambda: gutenberg("val", cache_dir=tmp_path), "The Book Two", books[1].url)
    assert len(shelf.asked) == 3 and files(tmp_path) == []  # three attempts, no trace


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_download_does_not_touch_the_books_already_there(books, shelf, tmp_path, fault):
    error, answer = FAULTS[fault]
    shelf.put("/a%20kite/three.txt", answer)
    refused(error, lambda: gutenberg("train", cache_dir=tmp_path), "The Book Three", books[2].url)
    assert files(tmp_path) == ["1.txt"] and (tmp_path / "1.txt").read_bytes() == RAW["one"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_later_attempt_succeeds(books, shelf, tmp_path, fault):
    shelf.put("/a%20kite/two.txt", FAULTS[fault][1], FAULTS[fault][1], (200, RAW["two"]))
    assert gutenberg("val", cache_dir=tmp_path) == {"two": story("two")}
    assert len(shelf.asked) == 3 and files(tmp_path) == ["2.txt"]


def test_no_server_is_one_clear_line(books, tmp_path, monkeypatch):
    gone = books[1]._replace(url="http://127.0.0.1:9/two.txt")
    monkeypatch.setattr(corpus, "BOOKS", (gone,))
    refused(OSError, lambda: gutenberg("val", cache_dir=tmp_path), "The Book Two", gone.url)
    assert files(tmp_path) == []


def test_an_address_that_is_none_is_one_clear_line(books, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "BOOKS", (books[1]._replace(url="http://"),))
    refused(OSError, lambda: gutenberg("val", cache_dir=tmp_path), "The Book Two", "http://")


def test_a_cache_that_is_a_file_is_one_clear_line(books, shelf, tmp_path):
    (tmp_path / "cache").write_text("not a folder")
    refused(OSError, lambda: gutenberg("val", cache_dir=tmp_path / "cache"), "The Book Two", str(tmp_path / "cache"))
    assert shelf.asked == []


def test_ctrl_c_leaves_no_half_file(books, tmp_path, monkeypatch):
    def interrupted(self, chunk_size):
        yield self.raw.read(20)
        raise KeyboardInterrupt
    monkeypatch.setattr("requests.Response.iter_content", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gutenberg("val", cache_dir=tmp_path)
    assert files(tmp_path) == []


def test_pooch_does_not_talk(books, shelf, tmp_path, capfd):
    records = []
    listener = logging.Handler()
    listener.emit = records.append
    pooch.get_logger().addHandler(listener)
    pooch.get_logger().setLevel("INFO")  # as in a fresh process
    shelf.put("/a%20kite/two.txt", FAULTS["cut mid-file"][1], (200, RAW["two"]))
    try:
        gutenberg("all", cache_dir=tmp_path)
    finally:
        pooch.get_logger().removeHandler(listener)
    out, err = capfd.readouterr()
    assert records == [] and out == ""
    assert "Gutenberg" in err and "/3" in err  # the progress bar is all there is


def test_an_error_closes_its_bar(books, shelf, tmp_path, capfd):
    shelf.put("/a%20kite/two.txt", FAULTS["page missing"][1])
    refused(OSError, lambda: gutenberg("val", cache_dir=tmp_path))
    shelf.put("/a%20kite/two.txt", (200, RAW["two"]))
    gutenberg("val", cache_dir=tmp_path)
    assert "\x1b[A" not in capfd.readouterr().err  # a second bar below the first would move the cursor up


def test_no_bar_and_no_network_with_raw_dir(books, shelf, tmp_path, capfd):
    (tmp_path / "2.txt").write_bytes(RAW["two"])
    assert gutenberg("val", raw_dir=tmp_path) == gutenberg("val", raw_dir=str(tmp_path)) == {"two": story("two")}
    assert shelf.asked == [] and capfd.readouterr() == ("", "")
    assert files(tmp_path) == ["2.txt"]


def test_raw_dir_missing_or_no_folder_or_a_folder_instead_of_a_file(books, tmp_path):
    refused(OSError, lambda: gutenberg("val", raw_dir=tmp_path), "The Book Two", str(tmp_path / "2.txt"))
    refused(OSError, lambda: gutenberg("val", raw_dir=tmp_path / "nowhere"), "The Book Two", "nowhere")
    (tmp_path / "2.txt").mkdir()
    refused(OSError, lambda: gutenberg("val", raw_dir=tmp_path), "The Book Two", str(tmp_path / "2.txt"))


@pytest.mark.parametrize("content", [b"", RAW["two"][:-1], RAW["two"] + b"\n", RAW["one"]])
def test_raw_dir_is_checked_too(books, tmp_path, content):
    (tmp_path / "2.txt").write_bytes(content)
    refused(ValueError, lambda: gutenberg("val", raw_dir=tmp_path), "The Book Two", str(tmp_path / "2.txt"), "sha256")
    assert (tmp_path / "2.txt").read_bytes() == content  # the user's file is his


@pytest.mark.parametrize("split", ["test", "validation", "Train", "", None, 1, ["train"], "al"])
def test_an_unknown_split_names_what_is_allowed(books, shelf, tmp_path, split):
    refused(ValueError, lambda: gutenberg(split, cache_dir=tmp_path), "'train', 'val' or 'all'", repr(split))
    assert shelf.asked == []


def test_two_sources_at_once_are_refused(books, tmp_path):
    refused(ValueError, lambda: gutenberg("val", cache_dir=tmp_path, raw_dir=tmp_path), "cache_dir", "raw_dir")


# ---------------------------------------------------------------- the table

def test_the_table_is_twenty_different_books():
    assert len(BOOKS) == 20 and [book.split for book in BOOKS].count("val") == 2 and {book.split for book in BOOKS} == {"train", "val"}
    for field in ("slug", "title", "gutenberg_id", "url", "sha256"):
        assert len({getattr(book, field) for book in BOOKS}) == 20, field
    assert {book.slug for book in BOOKS if book.split == "val"} == {"dorian-gray", "hound-of-the-baskervilles"}


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.slug)
def test_each_row_is_pinned(book):
    assert re.fullmatch(r"[0-9a-f]{64}", book.sha256) and re.fullmatch(r"[a-z-]+", book.slug)
    assert re.fullmatch(rf"https://raw\.githubusercontent\.com/GITenberg/[\w%-]+_{book.gutenberg_id}/[0-9a-f]{{40}}/{book.gutenberg_id}(-[08])?\.txt", book.url)


# ---------------------------------------------------------------- the real books, where they are

@pytest.fixture(scope="module")
def real(local_data):
    "All twenty, cleaned; `gutenberg` checks every hash on the way."
    raw = local_data / "gutenberg_raw"
    train, val = gutenberg("train", raw_dir=raw), gutenberg("val", raw_dir=raw)
    assert (len(train), len(val), len({**train, **val})) == (18, 2, 20)
    return {**train, **val}


def test_the_table_agrees_with_the_manifest(local_data):
    with open(local_data / "gutenberg_clean" / "manifest.tsv", encoding="utf-8", newline="") as file:
        rows = {row["slug"]: row for row in csv.DictReader(file, delimiter="\t")}
    assert set(rows) == {book.slug for book in BOOKS}
    for book in BOOKS:
        row = rows[book.slug]
        assert book == Book(row["slug"], row["title"], row["author"], int(row["gutenberg_id"]), row["split"],
                            f"https://raw.githubusercontent.com/{row['repo']}/{row['commit']}/{row['path']}", row["source_sha256"])
        assert hashlib.sha256((local_data / "gutenberg_raw" / f"{book.gutenberg_id}.txt").read_bytes()).hexdigest() == book.sha256


@pytest.mark.parametrize("pattern", [
    "Project Gutenberg", r"\*\*\* ?(START|END)", r"^Produced by [A-Z]", r"www\.", "https?:", "pglaf", "small print", "transcriber", "proofread",
    r"\be-?text", r"\[Illustration", "trademark", "donations? to", r"=>", "\r", "\ufeff", "\xa0", "\ufffd", r"\n{4}", r"[ \t]$"])
def test_nothing_of_the_licence_or_its_volunteers_is_left(real, pattern):
    flags = re.MULTILINE if pattern.startswith("^") else re.MULTILINE | re.IGNORECASE
    assert [slug for slug, text in real.items() if re.search(pattern, text, flags)] == []


def test_no_control_characters_and_one_newline_at_the_end(real):
    for slug, text in real.items():
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text), slug
        assert text.endswith("\n") and not text.endswith("\n\n") and not text.startswith("\n"), slug


EDGES = {
    "a-christmas-carol": ("A CHRISTMAS CAROL\n\nIN PROSE", "God bless Us, Every One!\n"),
    "a-tale-of-two-cities": ("A TALE OF TWO CITIES\n", "I go to than I have ever known.”\n"),
    "alice-in-wonderland": ("ALICE’S ADVENTURES IN WONDERLAND\n\nLewis Carroll\n", "the happy summer days.\n\n              THE END\n"),
    "dorian-gray": ("The Picture of Dorian Gray\n\nby\n\nOscar Wilde\n\n\nTHE PREFACE\n", "that they recognized who it was.\n"),
    "dracula": ("                                DRACULA\n", "JONATHAN HARKER.\n\n                                THE END\n"),
    "great-expectations": ("GREAT EXPECTATIONS\n\n[1867 Edition]\n\nby Charles Dickens\n\n\nChapter I\n", "I saw no shadow of another parting from her.\n"),
    "hound-of-the-baskervilles": ("THE HOUND OF THE BASKERVILLES\n\nBy A. Conan Doyle\n\n\nChapter 1. Mr. Sherlock Holmes\n", "a little dinner on the way?”\n"),
    "huckleberry-finn": ("ADVENTURES\n\nOF\n\nHUCKLEBERRY FINN\n", "THE END. YOURS TRULY, _HUCK FINN_.\n"),
    "jane-eyre": ("JANE EYRE\nAN AUTOBIOGRAPHY\n", "even so come, Lord Jesus!'\"\n"),
    "moby-dick": ("MOBY-DICK;\n\nor, THE WHALE.\n\nBy Herman Melville\n\n\n  ETYMOLOGY.\n", "only found another orphan.\n"),
    "sense-and-sensibility": ("SENSE AND SENSIBILITY\n\nby Jane Austen\n\n(1811)\n\n\nCHAPTER 1\n", "their husbands.\n\n\nTHE END\n"),
    "the-war-of-the-worlds": ("by H. G. Wells\n\n\n   ‘But who shall dwell", "counted me, among the dead.\n"),
    "wuthering-heights": ("WUTHERING HEIGHTS\n\n\nCHAPTER I\n", "sleepers in that quiet earth.\n"),
}


@pytest.mark.parametrize("slug", EDGES)
def test_first_and_last_words(real, slug):
    first, last = EDGES[slug]
    assert real[slug].startswith(first) and real[slug].endswith(last)


def test_old_encodings_are_read_right(real):
    assert "£" in real["dracula"] and "ö" in real["dracula"] and "é" in real["adventures-of-sherlock-holmes"]  # two files in Latin-1
    assert "“Penang lawyer.”" in real["hound-of-the-baskervilles"] and "ח" in real["moby-dick"]


def lines(text):
    "How often each line occurs, blanks evened out, empty lines left aside."
    return Counter(" ".join(line.split()) for line in text.splitlines() if line.strip())


def size(counted):
    return sum(len(line) * n for line, n in counted.items())


def test_agreement_with_another_careful_cleaning(real, local_data):
    "At least 99.5 % of all characters stand in lines that both cleanings have."
    for slug, text in real.items():
        ours, theirs = lines(text), lines((local_data / "gutenberg_clean" / f"{slug}.txt").read_text(encoding="utf-8"))
        share = 2 * size(ours & theirs) / (size(ours) + size(theirs))
        assert share >= 0.995, f"{slug}: {share:.4f}"


def test_the_validation_books_agree_to_the_byte(real, local_data):
    for slug in ("dorian-gray", "hound-of-the-baskervilles"):
        assert real[slug].encode() == (local_data / "gutenberg_clean" / f"{slug}.txt").read_bytes(), slug
