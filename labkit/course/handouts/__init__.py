"""Workshop handouts from executed notebooks: a set for students and one for the instructor.

`build.make_handouts` makes both. `solutions` finds the solutions and keeps them out of the students' files. `student` and
`instructor` turn an executed notebook into the copy for each audience. `page` and `print_page` make a page for the screen and one
for paper. `handout_folder` protects files that are not ours.
"""

from __future__ import annotations
