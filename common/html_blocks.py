"""The blocks of text of an HTML page: paragraphs, headings, entries of lists and tables."""

from collections.abc import Iterator

from lxml import etree, html

BLOCKS = ("p", "h1", "h2", "h3", "h4", "h5", "h6", "td", "li", "dt", "dd")
NO_TEXT = ("script", "style", "pre", "header", "footer", "aside", "nav")


def html_blocks(page: bytes, tags: tuple[str, ...] = BLOCKS) -> Iterator[tuple[str | None, str]]:
    """Yield (id or None, text on one line) of each innermost block with one of these tags that has text."""
    tree = html.document_fromstring(page)
    etree.strip_elements(tree, *NO_TEXT, with_tail=False)
    # Words that LibreOffice's help chooses by system or program, as Command or Ctrl: the last ones are the default.
    for switch in tree.iterfind(".//span[@class='switchinline']"):
        for choice in switch[:-1]:
            switch.remove(choice)
    for block in tree.iter(*tags):
        if next(block.iterdescendants(*BLOCKS), None) is None:
            text = " ".join("".join(block.itertext()).split())
            if text:
                yield block.get("id"), text
