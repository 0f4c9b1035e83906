"""Diagnosis of a run that waits: looks at the ranks, and the judgement of their reports."""
