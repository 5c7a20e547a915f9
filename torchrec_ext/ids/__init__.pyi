from ..batch import Fresh as Fresh
from .dynamic import DynamicIds as DynamicIds
from .embeddings import DynamicEmbeddings as DynamicEmbeddings
from .rows import Dynamic as Dynamic
