// Package sim is an adapter for a generated registry: services and instances
// drawn from a seed that change at a given rate.
package sim
