"""What turns notebooks into a course: the runner, handouts, and checks of exercises."""
