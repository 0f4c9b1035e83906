"""What turns notebooks into a course: checks of exercises, the runner of notebooks."""
