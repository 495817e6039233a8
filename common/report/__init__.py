"""Tables, figures and the HTML page that show experiments, benchmark records and published numbers.

Nothing is imported here, so that programs that need little of it start without pandas and scipy.
"""
