"""Signals reach their handler during any work of the main thread."""

import signal
import subprocess
import sys
import time

BUSY = """
import ctypes, os, signal
from tercet.protocol.system.process import on_signals

told = []

def note():
    told.append(1)
    os.write(1, f"{len(told)}\\n".encode())

on_signals([signal.SIGTERM, signal.SIGUSR1], note)
mask = (ctypes.c_ulong * 16)(*[2**64 - 1] * 16)
os.write(1, b"ready\\n")
ctypes.CDLL(None).ppoll(None, 0, ctypes.byref((ctypes.c_long * 2)(60, 0)), mask)  # signals do not end it
"""


def test_signals_are_handled_while_the_main_thread_is_in_native_code() -> None:
    process = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        began = time.monotonic()
        for count, number in enumerate((signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1), start=1):
            process.send_signal(number)
            assert process.stdout.readline() == f"{count}\n"
        assert time.monotonic() - began < 30
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
