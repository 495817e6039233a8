"""Tables and figures from run folders; results/definitions/tables/<name>.yaml says what each table needs.

Nothing is imported here: programs that need the command lines alone start without pandas and scipy.
"""
