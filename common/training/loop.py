"""The training loop: the same for every task, every parallel method, real and simulated workers."""

import contextlib
from collections.abc import Iterator

from common.interruptible import heard_alone
from common.parallel.collectives import gather_objects
from common.parallel.counters import region
from common.training.gradients import finish_gradients
from common.training.interruption import Interruption, Request
from common.training.recorder import Recorder
from common.training.run import Run
from common.training.timing import Trace
from common.training.worker import is_out_of_memory
from common.training.worker_group import WorkerGroup, begin, next_change, with_scripted_members


def train(run: Run) -> str:
    """Train to the configured number of committed updates, evaluating, recording and saving along the way.

    Every process calls it with the same configuration. In one update all local workers first run forward and
    backward, then all step: a process has one worker, a simulation has all of them. Returns "finished", or
    "interrupted" if a signal asked it to stop; a checkpoint was saved then.
    """
    config, recorder, steps = run.config, run.recorder, run.timetable.steps
    group = begin(run)
    with (
        step_named(recorder),
        Interruption(run.device, config.logging.every, group=group.workers[0].model.everyone) as interruption,
        heard_alone(),
        Trace(config.run_dir, run.rank, config.profile) as trace,
    ):
        request = Request.NOTHING
        while recorder.clock < steps and request is Request.NOTHING:
            group = with_scripted_members(group)
            request = train_until(next_change(config, recorder.clock) or steps, group, interruption, trace)
    status = "finished" if recorder.clock == steps else "interrupted"
    recorder.finish(status)
    if recorder.folder is not None:
        recorder.folder.close()
    gather_objects(None)  # launchers end all other ranks, rank 0 too, when the first one ends
    group.close()
    return status


def train_until(stop: int, group: WorkerGroup, interruption: Interruption, trace: Trace) -> Request:
    """Train until `stop` updates are committed or a process requests something else; return that request.

    Raises PeerError if a peer is gone. If the models `survive` it, the update is finished then, unless backward failed.
    """
    workers, recorder, timetable = group.workers, group.run.recorder, group.run.timetable
    request = Request.NOTHING
    while recorder.clock < min(stop, timetable.steps) and request is Request.NOTHING:
        before = recorder.clock
        with recorder.noise.of_update(before + 1):
            losses = group.backward()
        norms = [finish_gradients(worker, group.config.training.clip) for worker in workers]
        with region("optimizer"):
            for worker in workers:
                worker.scaler.step(worker.optimizer)
                worker.scaler.update()
        committed = recorder.clock > before  # the same on all ranks; false if a scaler skipped the step
        recorder.step(committed, losses, norms)
        for worker in workers:
            worker.optimizer.zero_grad(set_to_none=True)
            if committed:
                worker.schedule.step()
            worker.model.check_peers()
        trace.step()
        if committed and timetable.evaluates(recorder.clock):
            group.evaluate()
        request = interruption.requested(recorder.clock + recorder.skipped)
        if request is Request.STOP or (committed and timetable.saves(recorder.clock)):
            group.save()
    return request


@contextlib.contextmanager
def step_named(recorder: Recorder) -> Iterator[None]:
    """Add to an error a note that says after which step it was raised."""
    try:
        yield
    except Exception as error:
        error.add_note(f"after step {recorder.clock}")
        if is_out_of_memory(error):
            error.add_note("out of memory: expected a smaller model or training.batch_size, or fewer workers here")
        raise
