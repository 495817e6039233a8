"""Columns are parsed from their names, once."""

import pytest

from common.experiments.quantities import parse_column


@pytest.mark.parametrize(
    ("name", "variant", "quantity", "statistic", "of_runs"),
    [
        ("spectral_gap", None, "spectral_gap", "mean", True),
        ("train_loss_mean", None, "train_loss", "mean", True),
        ("en_de_bleu_2sigma", "en_de", "bleu", "2sigma", True),
        ("en_de_bleu_published", "en_de", "bleu", "published", False),
        ("en_de_bleu_published_2sigma", "en_de", "bleu", "published_2sigma", False),
        ("top1_difference", None, "top1", "difference", True),
        ("en_fr_bleu_equivalent", "en_fr", "bleu", "equivalent", True),
        ("spectral_gap_by_formula", None, "spectral_gap", "by_formula", False),
    ],
)
def test_variant_quantity_and_statistic(name, variant, quantity, statistic, of_runs):
    column = parse_column(name, [], ["en_de", "en_fr"], baseline="allreduce", margins={"bleu": 0.5})
    assert (column.variant, column.quantity.name, column.statistic) == (variant, quantity, statistic)
    assert column.of_runs == of_runs
    assert column.published_name == (f"{variant}_{quantity}" if variant else quantity)
