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
        ("en_de_b_bleu", "en_de_b", "bleu", "mean", True),
        ("time_step_ms", None, "time_step_ms", "mean", True),
    ],
)
def test_variant_quantity_and_statistic(name, variant, quantity, statistic, of_runs):
    column = parse_column(name, [], ["en_de", "en_fr", "en_de_b", "time"], baseline="allreduce", margins={"bleu": 0.5})
    assert (column.variant, column.quantity.name, column.statistic) == (variant, quantity, statistic)
    assert column.of_runs == of_runs
    assert column.published_name == (f"{variant}_{quantity}" if variant else quantity)


def test_a_name_with_two_meanings_is_refused():
    with pytest.raises(ValueError, match="it means local_top1_mean or top1_mean of local; expected a variant with ano"):
        parse_column("local_top1_mean", [], ["local"], None, None)
