"""The parts that turn notebooks into a course: runner, handouts, checks of exercises, learners' copies."""
