"""Tasks: prompts with verifiable rewards, procedural or from files."""
