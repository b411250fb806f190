"""`headrace top`: a run as it goes, on one screen, by keyboard.

    workers' reports, broker, log ──▶ `watching` ──▶ `model` ──▶ `views` (pure) ──▶ `app` (Textual)

Everything but `app` and its dialogs works without Textual.
"""
