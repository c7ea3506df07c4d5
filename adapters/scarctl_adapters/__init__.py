"""Adapt training frameworks to scarctl. A session finds adapters through the entry points `scarctl.adapters`."""
