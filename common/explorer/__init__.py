"""The explorer: one interactive HTML page with what kept and running runs recorded; it opens from disk.

`data.build` gathers everything that is shown, `page.render` makes the page of it. `python -m scripts.report` is its
command line.
"""
