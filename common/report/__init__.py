"""Tables, figures and the HTML report, made from run folders, benchmark records and published numbers.

Nothing is imported here, so that programs which need little of it start without pandas and scipy.
"""
