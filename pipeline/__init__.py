"""headrace."""

from broker.importing import import_without

# structlog would only draw tracebacks with rich: they are text before they are rendered (`logs.py`), and rich weighs 4 MB in every
# worker.
import_without("rich", library="structlog")
