"""What holds up a run: looks at the ranks, and the judgement of what they report."""
