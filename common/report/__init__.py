"""Tables and figures from run folders; configs/table/<name>.yaml says what each table needs."""

from common.report.registry import Cell, Row, Table, load_table
from common.report.runs import Run, RunError, read_run

__all__ = ["Cell", "Row", "Run", "RunError", "Table", "load_table", "read_run"]
