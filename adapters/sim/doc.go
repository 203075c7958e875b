// Package sim is an adapter for a registry that does not exist: services and instances made from a seed, changing at a given rate.
package sim
