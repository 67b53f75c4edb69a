from tests.unit.training.conftest import rank

__all__ = ["rank"]
