"""`python -m build_matrix serve`."""

from __future__ import annotations

import click

from build_matrix.commands.options import INDEX
from build_matrix.errors import BuildError
from build_matrix.serve import server


@click.command("serve")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@INDEX
def command(port, target) -> None:
    """Serves the index on loopback until interrupted."""
    if not (target / "whl").is_dir():
        raise BuildError(f"there is no index in {target}. Run: python -m build_matrix index")
    running = server.make(target, port)
    address = f"http://{server.HOST}:{running.server_address[1]}"
    click.echo(f"<index> is {address}; where torch is installed:")
    for line in server.lines(target, address):
        click.echo(line)
    try:
        running.serve_forever()
    except KeyboardInterrupt:
        running.server_close()
