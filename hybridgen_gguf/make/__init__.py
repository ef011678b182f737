"""Models made and fetched: download, convert, importance matrix, quantize, report. The engine runs in children only."""
