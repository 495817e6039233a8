"""Imported only by the server from which workers are forked, to block signals in it: a terminal and Slurm send theirs
to all processes, and without the server the end of its workers would go unnoticed."""

import os
import signal

from common.training.signals import SIGNALS

signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS))
