"""Workshop handouts from executed notebooks: a set for students and one for the instructor.

`build.make_handouts` makes both. `solutions` knows where solutions are and keeps them out of the students' files, `student` and
`instructor` turn an executed notebook into the copy of each audience, `page` and `print_page` make it a page for the screen
and one for paper, and `place` keeps what is not ours where it is.
"""

from __future__ import annotations
