"""HTTP administration of master and broker: methods as functions of their parameters, in the reference's formats."""
