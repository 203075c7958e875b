// Package deps tests the imports between the packages of the module.
package deps
