from .errors import CannotAdopt as CannotAdopt
from .rows.law import Popular as Popular
from .rows.law import Uniform as Uniform
from .rows.rows import Rows as Rows
from .step import AdoptedStep as AdoptedStep
from .step import adopt as adopt
from .tables import adopt_tables as adopt_tables
