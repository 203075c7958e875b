// Package config reads the configuration file of the bridge.
//
// The file is YAML, one document, read strictly: an unknown field, a field given twice or a value of the wrong type is an error. All
// problems are reported at once, each with file, line, column, the dotted path of the field and a cure.
//
// A string value may hold ${NAME}, which stands for the environment variable of that name; a variable that is not set is an
// error. $${ stands for a plain ${. What comes from the environment is never part of an error message, so that secrets stay
// where they are.
//
// The blocks registries[].config and registries[].translate belong to the registry's adapter. They are kept as JSON here, keys in
// the order of the file, and checked by the plugin; [Config.Problem] turns what it finds into a place in the file.
package config
