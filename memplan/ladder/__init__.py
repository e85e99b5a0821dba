"""The climb: points become runs, runs become rows, rows are on disk before the next one starts."""
