"""For all tests. One thread each: on a busy machine two threads that wait for one another take seconds for an op."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
