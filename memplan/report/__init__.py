"""From records to pages: tables, plots, files. Works wherever the records are; torch is never needed."""
