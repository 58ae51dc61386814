"""Plug-ins of this distribution.  The core imports none of them; they use the extension points that anybody may use."""
