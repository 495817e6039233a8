"""Tables, figures and the HTML page: what is shown of experiments, benchmark records and published numbers.

Nothing is imported here, so that programs which need little of it start without pandas and scipy.
"""
