"""`penstock pipeline`: check, run and account for pipelines."""

from __future__ import annotations

from penstock.cli.options import command_group
from penstock.cli.pipeline import check, init, ledger, run, submit

__all__ = ["app"]

app = command_group("Check and run pipelines.")
app.command()(init.init)
app.command()(check.validate)
app.command("plan")(check.show_plan)
app.command()(check.schema)
app.command("test")(check.run_cases)
app.command()(run.run)
app.command()(run.stop)
app.command()(submit.submit)
app.command()(ledger.status)
app.command()(ledger.reconcile)
app.add_typer(ledger.dead, name="dead")
