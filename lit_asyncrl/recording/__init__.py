"""Records an asynchronous run, and trains a recorded run again with bit-equal weights."""
