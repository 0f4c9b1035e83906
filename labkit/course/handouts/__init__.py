"""Workshop handouts from executed notebooks: a set for students and one for the instructor.

`build.make_handouts` makes both. `solutions` finds solutions and keeps them out of the students' files. `student` and `instructor`
turn an executed notebook into the copy for that audience. `page` and `print_page` make the pages for screen and paper.
`handout_folder` protects files that are not ours.
"""

from __future__ import annotations
