"""python -m build_matrix.site"""

import sys

from build_matrix import site
from build_matrix.errors import BuildError

try:
    site.build()
except BuildError as error:
    sys.exit(f"build_matrix.site: {error}")
print(f"the documentation is in {site.OUTPUT}/index.html")
