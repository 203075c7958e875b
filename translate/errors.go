package translate

// FieldError is one error in the translate block of a registry's configuration.
type FieldError struct {
	// Field is the dotted path from the registry's block: "translate.host",
	// "translate.ports[0].number".
	Field string
	// Reason describes the error and its remedy.
	Reason string
}

// Error returns "FIELD: REASON".
func (e *FieldError) Error() string { return e.Field + ": " + e.Reason }
