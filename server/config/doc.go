// Package config reads the configuration file of the bridge.
//
// The file is one YAML document and is read strictly: an unknown field, a
// duplicate field or a value of the wrong type is an error. All problems are
// reported at once, each with file, line, column, the dotted path of the field
// and a cure.
//
// In a string value, ${NAME} is replaced by the environment variable; an unset
// variable is an error. $${ stands for a literal ${. Error messages never
// contain values of the environment, which may be secret.
//
// The blocks registries[].config and registries[].translate belong to the
// registry's adapter. They are stored as JSON, keys in the order of the file,
// and validated by the plugin; [Config.Problem] converts the plugin's errors to
// positions in the file.
package config
