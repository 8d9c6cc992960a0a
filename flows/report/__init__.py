"""The page about a run: what is read from storage, figures, and the HTML around them."""

from flows.report.write import make_report, reported, write_report

__all__ = ["make_report", "reported", "write_report"]
