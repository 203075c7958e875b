// Package deploy tests the files in deploy with the tools that they are for.
package deploy
