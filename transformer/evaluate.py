"""Translate a split with every kept model of a run, score the translations, and draw the curves.

python -m transformer.evaluate run=runs/transformer/transformer_proxy/seed_0 [split=test] [models=all] [average=5]
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from pydantic import Field, NonNegativeInt, PositiveInt

from common.cli import Arguments, Text, UsageError, command_of, main_function, parse
from common.config.base import Processes
from common.config.config import ConfigError
from common.record.environment import now
from transformer.config import TrainedConfig
from transformer.data import ParallelText, evaluation_batches
from transformer.model import PAD, cross_entropy
from transformer.preparation.files import write_json, write_lines
from transformer.scores import bleu, chrf, meteor, paper_bleu, wordnet_problem
from transformer.task import check_beam, search_of
from transformer.translate import Translator, open_run

DEFINITIONS = {
    "loss": "plain cross-entropy of a target token in nats",
    "loss_smoothed": "the same with the run's label smoothing",
    "bleu": "sacreBLEU of detokenized translations",
    "chrf": "chrF2 of detokenized translations, by sacrebleu",
    "meteor": "METEOR by nltk (not METEOR 1.5) of detokenized translations",
    "paper_bleu": "BLEU as the paper's code computes it: greedy translations in Moses tokens, references cut as in "
    "training, tokenizer 13a, not smoothed; not comparable with sacreBLEU",
    "paper_meteor": "METEOR by nltk of the same lines as paper_bleu",
}


class EvaluateArguments(Arguments):
    """Command line of transformer.evaluate."""

    run: Text = Field(description="a run folder")
    split: Literal["test", "valid"] = Field("test", description="split to translate: test or valid")
    models: Literal["all", "best", "last"] = Field("all", description="best.pt, last.pt, or both and all kept models")
    average: NonNegativeInt = Field(0, description="also score the mean of the last K kept models; 0: do not")
    data: Text | None = Field(None, description="the data folder; null: the run's")
    batch_size: PositiveInt = Field(4096, description="tokens per batch")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto, cpu or cuda")
    threads: Processes | None = Field(None, description="number of CPU threads")


@dataclass(frozen=True)
class Candidate:
    """A model to evaluate.

    step:  the update after which it was saved; None if unknown
    files: state dicts; more than one are averaged
    """

    name: str
    step: int | None
    files: tuple[Path, ...]


@main_function
def main(argv: Sequence[str]) -> int:
    """Write RUN/evaluation/<split>.{csv,json,png} and the translations; exit code 2 if the run cannot be used."""
    arguments = parse(EvaluateArguments, argv, "transformer.evaluate", "Score the kept models of a run.")
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    try:
        evaluate(arguments)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    return 0


def evaluate(arguments: EvaluateArguments) -> None:
    """Evaluate a run as the arguments say. Raises ConfigError if something is missing or does not match."""
    folder = Path(arguments.run)
    run = open_run(folder, arguments.data, arguments.device)
    config, corpus = run.config, run.corpus
    candidates = list(find(folder, arguments.models, arguments.average))
    check_beam(config.decoding.beam, corpus.vocabulary)
    text = corpus.evaluated(arguments.split)
    references, raw = corpus.references(arguments.split)
    # The authors' references are the lines as their vocabulary decodes them, cut like training pairs.
    cut = corpus.split(arguments.split, config.data.max_length)
    paper_references = [corpus.words(cut.target_tokens(i)) for i in range(len(cut))]
    folder = folder / "evaluation"
    rows, signatures = [], {}
    for candidate in candidates:
        translator = run.translator(candidate.files, search_of(config), arguments.batch_size)
        best = translator.split(text)
        # All hypotheses of the authors' beam search start out equal and stay equal, whatever the beam
        # (batch_beam_search in their transformer/src/utils.py): it is greedy.
        greedy = replace(translator, search=replace(translator.search, beam=1)).split(text)
        hypotheses = [corpus.line(tokens) for tokens in best]
        write_lines(folder / f"{arguments.split}.{candidate.name}.txt", hypotheses)
        row: dict[str, Any] = {"model": candidate.name, "step": candidate.step}
        row |= losses(translator, config, text)
        row["bleu"], signatures["bleu"] = bleu(hypotheses, references)
        row["chrf"], signatures["chrf"] = chrf(hypotheses, references)
        paper_hypotheses = [corpus.words(tokens) for tokens in greedy]
        row["paper_bleu"] = paper_bleu(paper_hypotheses, paper_references)
        if wordnet_problem() is None:
            row["meteor"] = meteor(hypotheses, references)
            row["paper_meteor"] = meteor(paper_hypotheses, paper_references)
        rows.append(row)
        print(
            "  ".join(f"{key} {v:.4f}" if isinstance(v, float) else f"{key} {v}" for key, v in row.items()), flush=True
        )
    frame = pd.DataFrame(rows)
    frame.to_csv(folder / f"{arguments.split}.csv", index=False, lineterminator="\n", float_format="%.6g")
    record = {
        "command": command_of("transformer.evaluate", arguments),
        "date": now(),
        "lines": len(references),
        "references": "raw" if raw else "detokenized: the data folder has no raw lines, so scores are not comparable",
        "search": config.decoding.model_dump(),
        "definitions": {name: DEFINITIONS[name] for name in frame.columns if name in DEFINITIONS},
        "signatures": signatures,
        "rows": rows,
    }
    write_json(folder / f"{arguments.split}.json", record)
    draw(frame, folder / f"{arguments.split}.png", f"{config.name}, {arguments.split}")
    print(f"sacreBLEU signature: {signatures['bleu']}\nchrF signature: {signatures['chrf']}")
    print(f"paper_bleu: {DEFINITIONS['paper_bleu']}")
    print(wordnet_problem() or f"meteor: {DEFINITIONS['meteor']}")
    print(f"written: {folder / arguments.split}.{{csv,json,png}}")


def find(run: Path, models: str, average: int) -> Iterator[Candidate]:
    """Yield the run's models by step, then best, last and the average. Raises ConfigError if there are none."""
    folder = run / "checkpoints"
    kept = sorted(file for file in (folder / "models").glob("step_*.pt") if file.stem[5:].isdecimal())
    steps = [int(file.stem.removeprefix("step_")) for file in kept]
    summary = run / "summary.json"
    try:
        record = json.loads(summary.read_text()) if summary.exists() else {}
        best = (record.get("best") or {}).get("validation") or {}
        single = {"best": best.get("step"), "last": record.get("steps")}
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{summary}: expected the summary of a run ({error}); remove it to go on") from error
    found = [Candidate(file.stem, step, (file,)) for file, step in zip(kept, steps, strict=True) if models == "all"]
    for name, step in single.items():
        if models in ("all", name) and (folder / f"{name}.pt").exists():
            found.append(Candidate(name, step, (folder / f"{name}.pt",)))
    if not found:
        raise ConfigError(f"run={run}: no model in {folder}")
    if average > len(kept):
        raise ConfigError(
            f"average={average}: expected at most the {len(kept)} models in {folder / 'models'}; train with "
            "evaluation.models_kept=N to keep the last N"
        )
    yield from found
    if average:
        yield Candidate(f"average_{average}", steps[-1], tuple(kept[-average:]))


@torch.no_grad()
def losses(translator: Translator, config: TrainedConfig, text: ParallelText) -> dict[str, float]:
    """Return the plain and the smoothed cross-entropy per target token of the split."""
    sums, tokens = [0.0, 0.0], 0
    for batch in evaluation_batches(text, 0, 1, translator.batch_size, translator.device):
        logits = translator.model(batch.source, batch.target_input, batch.source_mask)
        for index, smoothing in enumerate((0.0, config.label_smoothing)):
            sums[index] += cross_entropy(logits, batch.target, smoothing, config.smoothed_over).item()
        tokens += int((batch.target != PAD).sum())
    return {"loss": sums[0] / tokens, "loss_smoothed": sums[1] / tokens}


def draw(frame: pd.DataFrame, file: Path, title: str) -> None:
    """Plot BLEU, METEOR and loss of the kept models against steps; best.pt, last.pt and averages as single points."""
    import seaborn as sns
    from matplotlib.figure import Figure

    panels = {"bleu": "sacreBLEU", "meteor": "METEOR (nltk)", "loss": "loss (nats)"}
    panels = {name: label for name, label in panels.items() if name in frame}
    frame = frame.assign(model=frame["model"].where(~frame["model"].str.startswith("step_"), "kept"))
    figure = Figure(figsize=(3.2 * len(panels), 2.8), layout="constrained")
    for ax, (name, label) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        sns.lineplot(frame, x="step", y=name, hue="model", marker="o", legend=name == "bleu", ax=ax)
        ax.set(ylabel=label)
    figure.suptitle(title, fontsize=9)
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
