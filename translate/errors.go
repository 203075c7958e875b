package translate

// FieldError is one thing wrong with the translate block of a registry's configuration.
type FieldError struct {
	// Field is the dotted path from the registry's block: "translate.host", "translate.ports[0].number".
	Field string
	// Reason says what is wrong and how to mend it.
	Reason string
}

// Error returns "FIELD: REASON".
func (e *FieldError) Error() string { return e.Field + ": " + e.Reason }
