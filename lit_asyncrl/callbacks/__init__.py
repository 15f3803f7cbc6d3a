"""Lightning callbacks: the asynchronous rollout and the controls of the optimizer step."""
