"""The explorer: one interactive HTML page with what kept and running runs recorded; it opens from disk.

`data.build` gathers everything that is shown, and `page.render` turns it into the page. `python -m scripts.report` is
its command line.
"""
