"""The demo's documents and languages: what can be read, and how it looks to a model."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("gradio", reason="the demo needs gradio: pip install -e '.[demo]'")

from demo import documents
from demo.language import Language
from demo.models import PROBE, Models


@pytest.fixture(scope="module")
def probe():
    return Models(torch.device("cpu")).load(PROBE)


# ---------------------------------------------------------------------- documents


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("plain.txt", "Gr\u00fc\u00dfe".encode()),
        ("marked.TXT", b"\xef\xbb\xbfGr\xc3\xbc\xc3\x9fe"),
        ("windows.txt", "Gr\u00fc\u00dfe".encode("utf-16")),
        ("notes.md", "Gr\u00fc\u00dfe".encode()),
    ],
)
def test_text_files(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    assert documents.read_upload(path) == "Gr\u00fc\u00dfe"


def a_pdf(text: str) -> bytes:
    """A PDF of one page, by hand."""
    stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        b"/Resources << /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
    ]
    out, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    trailer = b"xref\n0 5\n0000000000 65535 f \n%strailer\n<< /Size 5 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n"
    return out + trailer % (table, len(out))


def test_pdf_files(tmp_path):
    path = tmp_path / "one.pdf"
    path.write_bytes(a_pdf("The rabbit is late"))
    assert documents.read_upload(path).strip() == "The rabbit is late"


def test_encrypted_pdf(tmp_path):
    from pypdf import PdfReader, PdfWriter

    (tmp_path / "open.pdf").write_bytes(a_pdf("secret"))
    writer = PdfWriter(clone_from=PdfReader(tmp_path / "open.pdf"))
    writer.encrypt("password", algorithm="RC4-128")
    writer.write(tmp_path / "closed.pdf")
    with pytest.raises(documents.DocumentError, match="encrypted"):
        documents.read_upload(tmp_path / "closed.pdf")


def test_a_pdf_that_takes_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_PDF_SECONDS", 0.01)
    path = tmp_path / "slow.pdf"
    path.write_bytes(a_pdf("slow"))
    with pytest.raises(documents.DocumentError, match="took longer"):
        documents.read_upload(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("program.exe", b"MZ", "only .txt, .md, .pdf"),
        ("empty.txt", b" \n", "holds no text"),
        ("zeros.txt", b"a\0b", "no text file"),
        ("latin.txt", b"\xe9t\xe9", "not UTF-8"),
        ("noise.pdf", b"not a pdf", "cannot be read as PDF"),
        ("blank.pdf", a_pdf(""), "holds no text"),
        ("long.txt", b"a" * (documents.MAX_CHARACTERS + 1), "characters; at most"),
        ("large.txt", b"a" * (documents.MAX_UPLOAD + 1), "MB; at most"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(documents.DocumentError, match=message):
        documents.read_upload(path)


def test_the_bundled_text_is_there():
    text = documents.bundled()
    assert text.startswith("ALICE'S ADVENTURES IN WONDERLAND")
    assert 100_000 < len(text) < 200_000


def test_fit_and_hide():
    assert documents.fit([1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]
    assert documents.fit([1, 2, 3], 2) == [1, 2]
    ids = list(range(10))
    assert documents.hide(ids, [99], 0.0) == [99, *ids]
    assert documents.hide(ids, [99], 1.0) == [*ids, 99]
    assert documents.hide(ids, [99], 0.5) == [*ids[:5], 99, *ids[5:]]
    assert documents.hide(ids, [99], 0.5, frozenset({6})) == [*ids[:7], 99, *ids[7:]]
    with pytest.raises(documents.DocumentError, match="no tokens"):
        documents.fit([], 5)


# ---------------------------------------------------------------------- languages


def test_the_probe_reads_its_own_language_only(probe):
    language = probe.language
    assert language.probe
    with pytest.raises(documents.DocumentError, match="own language"):
        language.document("Alice was beginning to get very tired")
    with pytest.raises(documents.DocumentError, match="ask k003 k017"):
        language.check_question("who is Alice?")
    language.check_question(language.needle(1).question)
    with pytest.raises(documents.DocumentError, match="ask something"):
        language.check_question("  ")


@pytest.mark.small_model
def test_a_chat_template_around_document_and_questions(small_model_dir):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small_model_dir)
    language = Language(tokenizer)
    document = "It was late."
    ids = [*language.head(), *language.ids(document), *language.question("Was it late?", True)]
    content = f"Read the text below, then answer the question about it.\n\n{document}\n\nQuestion: Was it late?"
    chat = [{"role": "user", "content": content}]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    more = [*ids, *language.ids("Yes."), *language.question("How late?", False)]
    chat += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "How late?"}]
    assert tokenizer.decode(more) == tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
