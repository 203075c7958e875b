// Package compose runs docker-compose.yaml on a real Docker engine.
package compose
