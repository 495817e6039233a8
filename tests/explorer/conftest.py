from tests.experiments.conftest import in_an_empty_folder, registered, table

__all__ = ["in_an_empty_folder", "registered", "table"]
